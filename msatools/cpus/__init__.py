# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets and the work of each CPU."""
