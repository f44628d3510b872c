"""Integrations with training frameworks: one package for each framework, imported by its users only.

Each framework is imported by its own package and by nothing else. No other room imports this one.
"""
