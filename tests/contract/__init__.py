# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands' contract: a row per command, and the units that keys of JSON name."""
