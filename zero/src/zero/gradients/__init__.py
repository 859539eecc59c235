"""From autograd to this rank's slice: flat buffers, reduction, and the one factor they are multiplied by."""
