# SPDX-License-Identifier: LGPL-2.1-or-later

"""The scan of the memmap: it classifies all pages and sums them up."""
