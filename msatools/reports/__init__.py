# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads reports from files, and compares them."""
