"""What models need whose sequences are divided over ranks; the engine trains them as it does others.

tokens                  batches divided over ranks, and the loss over all of them
ulysses                 attention over whole sequences, by an all-to-all of heads and tokens
"""
