# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each task waits on, as prstat reports it."""
