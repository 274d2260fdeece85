# SPDX-License-Identifier: LGPL-2.1-or-later

"""The command line: arguments, runs, screens and files, common to all commands."""
