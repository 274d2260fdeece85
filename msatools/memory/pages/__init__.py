# SPDX-License-Identifier: LGPL-2.1-or-later

"""Struct pages: where they lie, their layout, and the class of each page."""
