"""The conformance kit: what a backend must do, as tests that ship with accelz.

    accelz check NAME
    pytest --pyargs accelz.conformance --accelz-device NAME

Each role's contract is a class (`MemoryContract` in `test_memory`, `FlatBufferContract` in
`test_flat_buffers`, …) of plain pytest tests. To extend a contract, a vendor subclasses it in a test file
of their own, overrides or adds tests, and runs pytest there with the same option:

    from accelz.conformance.test_memory import MemoryContract

    class TestMemory(MemoryContract):
        def test_the_pool_is_shared(self, accelerator): ...

torch's operators on the device are compared with the host's (`test_operators`), and a small model is trained
(`test_training`).

A capability that is declared and does not work is a failure. One that works but is not declared is a warning
(`UndeclaredCapabilityWarning`). A test is skipped only if a capability that it needs is not declared.
"""

TEST_SECONDS = 120.0
"""How many seconds a test may take before it counts as hanging, unless another limit is given."""
