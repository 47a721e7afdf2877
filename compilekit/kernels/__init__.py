"""Triton kernels of our own, for what a language model's step leaves to libraries.

A build traces them like a user's own Triton kernels, so that a program carries their
cubins and a start needs neither Triton nor this package. Importing a module of it
imports Triton.
"""
