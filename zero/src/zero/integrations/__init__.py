"""Adapters by which the training loops of other libraries train with the engine, one module for each library.

Nothing here is imported by the rest of zero, and each module imports its library: `import
zero.integrations.accelerate` needs `pip install accelz-zero[accelerate]`, and so on. Only `deepspeed` needs
nothing: it takes the place of its library.
"""
