"""Contract doubles of vendors' modules: their signatures and restrictions without their devices.

`machine.py` puts one together with a file system that shows its device, and runs scripts on it. What a double
refuses, the vendor's module refuses; each refusal has a test in test_hpu_double.py or test_xpu.py.
"""
