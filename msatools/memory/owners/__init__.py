# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages whose owner is recorded outside of struct page."""
