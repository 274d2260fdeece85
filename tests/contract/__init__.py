# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands' contract as tables: a row per command, and shapes of its JSON."""
