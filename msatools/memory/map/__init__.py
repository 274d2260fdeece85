# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, divided into cells."""
