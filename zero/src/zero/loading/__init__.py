"""Stored tensors into a model, each rank reading its slices; and what succeeds on every rank or on none.

Modules, lowest first:

problems, together      errors as messages between ranks; actions that succeed on every rank, or raise
tensor_reader, weights  reading stored tensors; filling parameters and buffers
"""
