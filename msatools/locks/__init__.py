# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait on: locks, files, other tasks."""
