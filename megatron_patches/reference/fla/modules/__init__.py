"""Convolution and norm."""
