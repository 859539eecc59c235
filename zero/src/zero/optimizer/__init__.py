"""The user's optimizer over this rank's pieces.

Modules, lowest first:

joint                   several optimizers as one
lion, kernel_rules      which optimizers a kernel serves, and with what state; Lion, which torch lacks
routes                  which rank steps a whole parameter, and what travels there and back
stepping, checks        how each parameter is stepped; which optimizers are accepted
piece_state, state_size what an optimizer keeps for a piece, wrappers of tensors included; and how much
stepped, pieces         the sub-groups with this rank's pieces; pieces as tensors; where blocks are
shown_state             what the optimizer's state shows of them, and what is refused of it
installed               what the user's optimizer object holds: pieces, and views of their state
group_step              one sub-group's step by a kernel
captured_step           all of these as one graph, captured and replayed
taken_over              what the optimizer object does from now on
parameter_exchange, self_stepping
                        steps by the optimizer itself, of slices or of whole parameters
record_streamer         records on the host that come to the device for their step
hyper_parameters        what schedulers change
sharded_optimizer       all of it behind the user's optimizer object
state_offload           all state out of the device for a while
integrity               whether an engine may go on
"""
