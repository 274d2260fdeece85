# SPDX-License-Identifier: LGPL-2.1-or-later

"""Benchmarks against named peers; ``make bench`` runs them."""
