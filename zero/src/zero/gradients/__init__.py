"""From autograd to this rank's slice: flat buffers, reduction, and the one factor they are multiplied by.

Modules, lowest first:

loss_scale              for fp16
reduced_slice           what is left of a group's gradients, in its tier
group_gradients         a group's whole buffer while backward runs
replica_sums            sums over several replicas of the model
skipped_steps           steps that are skipped one after another
reducer                 all groups, in one order on all ranks
factor                  averaging, unscaling and clipping as one number
"""
