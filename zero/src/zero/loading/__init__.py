"""Stored tensors into a model, each rank reading its slices; and what succeeds on every rank or on none.

Modules, lowest first:

together                actions that succeed on every rank, or raise; errors as messages between ranks
tensor_reader, weights  reading stored tensors; filling parameters and buffers
"""
