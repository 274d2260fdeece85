# SPDX-License-Identifier: LGPL-2.1-or-later

"""Helpers shared by tests of several packages, and pytest plugins."""
