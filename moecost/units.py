"""The only place where a power of ten or two is written. GB is 10^9 bytes, GiB is 2^30 bytes."""

from __future__ import annotations

from typing import Final

MEGA: Final = 1e6
GIGA: Final = 1e9
TERA: Final = 1e12

GB: Final = GIGA
"""Decimal gigabyte: what is printed on the box, and the unit of bandwidths. [byte]"""
GIB: Final = float(2**30)
"""Binary gigabyte: what drivers and PyTorch report. [byte]"""
MIB: Final = float(2**20)

MILLISECOND: Final = 1e-3
HOUR: Final = 3600.0

FLOPS_PER_MAC: Final = 2
"""A multiply-add counts as two floating-point operations."""
BITS_PER_BYTE: Final = 8
