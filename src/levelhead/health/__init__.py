"""Attention health: see every head of the model you already have, and what to do about it."""

from __future__ import annotations
