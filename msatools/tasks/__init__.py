# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks: their records, their stacks and what they wait for."""
