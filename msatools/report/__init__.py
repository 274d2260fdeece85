# SPDX-License-Identifier: LGPL-2.1-or-later

"""What happened to a kernel, and what is wrong with it; stands on all domains."""
