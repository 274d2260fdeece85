# SPDX-License-Identifier: LGPL-2.1-or-later

"""A plugin of sos: the reports of all msatools commands on the running kernel, as JSON.

Install it as sos/report/plugins/msatools.py in the folder of Python's packages. It is
enabled where msa is installed; ``sos report -o msatools`` runs it alone.
"""

from sos.report.plugins import DebianPlugin, IndependentPlugin, Plugin, UbuntuPlugin

COMMANDS = ("cpus", "locks", "memstat", "prstat", "report", "zombies")

TIMEOUT_SECONDS = 300
"""For each command: more than any takes on a machine that is overloaded."""

LIMIT_MIB = 200
"""sos keeps the end of longer output, which would be no JSON."""


# sos 4.0 loads no independent plugins on Debian.
class Msatools(Plugin, IndependentPlugin, DebianPlugin, UbuntuPlugin):
    """Where the memory is, what tasks do and wait for, zombies, and CPUs."""

    short_desc = "msatools: memory, tasks, locks, zombies and CPUs of the kernel"
    plugin_name = "msatools"
    profiles = ("kernel", "memory", "performance", "system")
    packages = ("msatools",)
    commands = ("msa",)

    def setup(self):
        """Name the commands whose output is collected."""
        for name in COMMANDS:
            self.add_cmd_output(
                f"msa {name} --json",
                suggest_filename=f"msa_{name}.json",
                timeout=TIMEOUT_SECONDS,
                sizelimit=LIMIT_MIB,
                # Messages between the lines would be no JSON.
                stderr=False,
            )
