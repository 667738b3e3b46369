"""Measurements of live sessions."""
