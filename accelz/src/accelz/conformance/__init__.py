"""The conformance kit: what a backend must do, as tests that ship with accelz.

    accelz check NAME
    pytest --pyargs accelz.conformance --accelz-device NAME

Each role's contract is a class (`MemoryContract` in `test_memory`, `FlatBufferContract` in
`test_flat_buffers`, …) of plain pytest tests. A vendor who wants more of one subclasses it in a test file
of their own, overrides or adds tests, and runs pytest there with the same option:

    from accelz.conformance.test_memory import MemoryContract

    class TestMemory(MemoryContract):
        def test_the_pool_is_shared(self, accelerator): ...

What a backend declares and fails is a failure. What works although undeclared is a warning
(`UndeclaredCapabilityWarning`). A test is skipped only for a capability that is not declared.
"""

TEST_SECONDS = 120.0
"""How long a test may take before it counts as hanging, unless another limit is given."""
