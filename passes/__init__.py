"""Compiler passes: from captured graphs and numbers to a verified step plan.

Nothing here touches a device, a stream, a process group or a tensor's data, and nothing imports
``pstar_compile``.
"""
