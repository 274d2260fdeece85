# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tests of several packages use, and how all of them are run."""
