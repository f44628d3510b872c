"""Scenarios: functions that every process of a group calls with its rank, the world size and a folder.

``support.hosts`` runs them by name, so the names are unique in this package.
"""
