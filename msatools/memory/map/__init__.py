# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, cut in as many cells as are shown."""
