# SPDX-License-Identifier: LGPL-2.1-or-later

"""The command line: words, runs, screens and files, the same for all commands."""
