"""Helpers that several tests share, and the programs that tests start as child processes.

``paths`` and ``devices`` set up a process. ``meshes``, ``boxes``, ``training``, ``runs`` and ``async_saves`` make
states and compare them. ``s3`` and ``fault_injection`` let storage fail. ``hosts``, ``rank_processes`` and
``fork_server`` start processes; ``scenarios`` holds what simulated hosts do. Nothing here is collected as a test.
"""
