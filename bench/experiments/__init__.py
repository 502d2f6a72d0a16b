"""The measurements behind the subcommands: loads and engine loops, and the figures made of several of them.

Whatever is compared is measured in turn in one process, so that a machine that is slower today is slower for both sides. Ctrl-C ends an
experiment after its current measurement, with the figures of what was measured.
"""
