"""Training through torch.compile: ZeRO-3 as passes over graphs.

Modules, lowest first:

units_by_use, facts     units for graphs; what passes know of the engine, without tensors
activations, runtime    what the operations in graphs do to the engine
ops                     these operations: the list of them is here
graphs, liveness        reading graphs; the memory that they take
passes, pipeline        one pass per file; all of them in their order
explain                 what the passes did
inductor, backend       the inner compiler; what dynamo calls
persistence             units that stay gathered until the weights change
model                   the model whose calls are compiled
compile_calls           puts it all together
"""
