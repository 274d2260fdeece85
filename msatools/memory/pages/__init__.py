# SPDX-License-Identifier: LGPL-2.1-or-later

"""Struct pages: their addresses, their layout, and the class of each page."""
