"""Training through torch.compile: ZeRO-3 as passes over graphs.

Modules, lowest first:

facts                   what passes know of the engine, without tensors
activations, pending_backwards, runtime
                        what the operations in graphs do to the engine
ops                     these operations: the list of them is here
graphs, liveness        reading graphs; the memory that they take
passes                  one pass per file
persistence             units that stay gathered until the weights change
segments, replays       what device graphs can hold of a graph; capturing and replaying it
explain                 what the passes and replays did
pipeline                all passes in their order
inductor, local_inputs, backend
                        the inner compiler; DTensors as their local tensors; what dynamo calls
model                   the model whose calls are compiled; puts it all together
"""
