// SPDX-License-Identifier: LGPL-2.1-or-later

/*
 * The scan's inner loops: one pass over struct pages instead of several numpy passes of
 * classify.py and sums.py. The numpy code is the definition; this has the same result for
 * each page, even a damaged one. classify.py has the reasons for the order of the tests,
 * and the commits of the kernel.
 *
 * The layout of struct page, the codes of classes and all memory come from compiled.py,
 * which defines the same two structs. The data is untrusted: an index from a struct page
 * is compared with the number of pages before its use.
 */

#include <stdint.h>
#include <string.h>

#define MAX_ORDER 20 /* as in classify.py */

/* All members have 8 bytes, so that there is no padding. */
struct layout {
	/* Offsets within struct page. */
	int64_t size, flags, compound_head, mapping, private, mapcount, refcount;
	int64_t entire_mapcount; /* in the first tail's struct page */
	/* Masks of page->flags. */
	uint64_t head, reserved, hwpoison, slab, swapbacked, swapcache;
	/* Page types: PageTypes in layout.py. */
	uint64_t lowest, shift, mask;
	const uint8_t *type_classes; /* mask + 1 elements */
	const uint8_t *mapping_classes; /* 16 elements */
	/* HugetlbMark in layout.py; mark_size is 0 without one. */
	int64_t mark, mark_size;
	uint64_t mark_mask, mark_value;
	uint64_t compound_mask, fake_heads, large_kmalloc_type; /* booleans */
	/* Codes of classes, each a byte. */
	uint64_t unattributed, free_buddy, free_hugetlb, anon, ksm, hugetlb, file, shmem;
	uint64_t slab_class, large_kmalloc, reserved_class, poisoned, excluded;
};

struct scan {
	struct layout is;
	/* The current block; its data must stay in place until it is summed. */
	const uint8_t *data;
	int64_t pages;
	uint64_t pfn, address;
	uint64_t flags_or, flags_and; /* OR and AND of all pages' flags */
	/* Columns of the block, one element a page: see Block in classify.py. */
	uint64_t *mapping; /* only if own_mapping */
	uint8_t *codes;
	uint32_t *heads; /* only if there are tails; index of the head, or of the page itself */
	/* Lists of pages; tails has twice the room, and ends with the fake heads. */
	int64_t *notable, *zeros, *tails, *tail_heads;
	int64_t notables, zeroes, ntails, nfakes, own_mapping; /* own_mapping is a boolean */
	/* Scratch space of each step, one element a page. */
	uint8_t *scratch_codes;
	uint64_t *scratch;
	/* The lowest and highest head outside the block; class and mapping if single. */
	int64_t far_low, far_high;
	uint64_t far_code, far_mapping;
	/* Results of msa_sum(): pages by class, 256 elements; runs of cached pages. */
	int64_t *counts, anon_unmapped, anon_swapcache, shmem_swapcache, nameless;
	uint64_t *cache_mappings;
	int64_t *cache_pages, cache_runs;
};

static inline uint64_t u64(const uint8_t *at)
{
	uint64_t word;
	return *(uint64_t *)memcpy(&word, at, sizeof(word));
}

static inline uint32_t u32(const uint8_t *at)
{
	uint32_t word;
	return *(uint32_t *)memcpy(&word, at, sizeof(word));
}

static inline const uint8_t *page(const struct scan *s, int64_t i)
{
	return s->data + i * s->is.size;
}

/* Return the class of a page by its own flags, type and mapping. */
static inline uint8_t class_of(const struct layout *is, uint64_t flags,
			       uint64_t mapping, uint32_t word)
{
	int swapbacked = (flags & is->swapbacked) != 0;
	int key = (int)(mapping & 3) | (mapping != 0) << 2 | swapbacked << 3;
	uint8_t code = is->mapping_classes[key];

	if (key == 8 && (flags & is->swapcache) == is->swapcache)
		code = (uint8_t)is->anon;
	if (flags & is->reserved)
		code = (uint8_t)is->reserved_class;
	if (word + 1 > is->lowest) { /* -1 wraps round to 0 */
		uint8_t type = is->type_classes[word >> is->shift & is->mask];

		if (type != is->unattributed)
			code = type;
	}
	return flags & is->slab ? (uint8_t)is->slab_class : code;
}

/* Classify each page by itself; list the pages that later steps need. */
static void look_at_each(struct scan *s)
{
	const struct layout is = s->is;
	const uint64_t bits = is.head | is.reserved | is.hwpoison | is.slab;
	const uint8_t *p = s->data;
	uint8_t *restrict codes = s->codes;
	int64_t *notable = s->notable, *zeros = s->zeros;
	int64_t *tails = s->tails, *infos = s->tail_heads;
	/* Most pages are like the one before: only their class is stored. */
	uint64_t any = 0, all = UINT64_MAX, last_flags = 0, last_mapping = 0;
	uint32_t last_word = 0;
	uint8_t code = 0, plain = 0;

	for (int64_t i = 0; i < s->pages; i++, p += is.size) {
		uint64_t flags = u64(p + is.flags), mapping = u64(p + is.mapping);
		uint64_t info = u64(p + is.compound_head);
		uint32_t word = u32(p + is.mapcount);

		if (!plain || (flags ^ last_flags) | (mapping ^ last_mapping) |
				      (word ^ last_word)) {
			code = class_of(&is, flags, mapping, word);
			any |= flags;
			all &= flags;
			plain = !(flags & bits) && (flags | mapping | word);
			if (flags & bits)
				*notable++ = i;
			if (!(flags | mapping | info | word) && !u32(p + is.refcount))
				*zeros++ = i;
			last_flags = flags;
			last_mapping = mapping;
			last_word = word;
		}
		codes[i] = code;
		if (info & 1) {
			*tails++ = i;
			*infos++ = (int64_t)info;
		}
	}
	s->flags_or = any;
	s->flags_and = all;
	s->notables = notable - s->notable;
	s->zeroes = zeros - s->zeros;
	s->ntails = tails - s->tails;
	s->nfakes = 0;
	s->own_mapping = 0;
}

/* Copy the mappings, which are about to differ from the struct pages. */
static void own_mapping(struct scan *s)
{
	for (int64_t i = 0; !s->own_mapping && i < s->pages; i++)
		s->mapping[i] = u64(page(s, i) + s->is.mapping);
	s->own_mapping = 1;
}

/* Distinguish hugetlb from kernel pages, and fake heads from real ones. */
static void compound_heads(struct scan *s)
{
	const struct layout *is = &s->is;

	for (int64_t k = 0; k < s->notables; k++) {
		int64_t i = s->notable[k];
		const uint8_t *p = page(s, i), *second = p + is->size;
		uint64_t named, own = s->address + (uint64_t)(i * is->size) + 1;
		uint8_t *code = &s->codes[i];

		if (i + 1 >= s->pages || !(u64(p + is->flags) & is->head))
			continue;
		named = u64(second + is->compound_head);
		if (is->fake_heads && named & 1 && named != own) {
			s->tails[s->ntails] = i;
			s->tail_heads[s->ntails++] = (int64_t)named;
			s->nfakes++;
			continue;
		}
		if (is->mark_size && *code != is->slab_class) {
			const uint8_t *at = second + is->mark;
			uint64_t mark = is->mark_size == 8 ? u64(at) : *at;

			if ((mark & is->mark_mask) == is->mark_value)
				*code = (uint8_t)is->hugetlb;
		}
		if (*code == is->hugetlb && !u32(p + is->refcount))
			*code = (uint8_t)is->free_hugetlb;
		if (*code == is->unattributed && !is->large_kmalloc_type &&
		    u32(p + is->refcount) == 1)
			*code = (uint8_t)is->large_kmalloc;
	}
}

/* Convert compound_head of tails to indices; count heads outside the block. */
static int64_t find_heads(struct scan *s)
{
	const int64_t size = s->is.size;
	uint64_t offset = 0;
	int64_t head = 0, far = 0;

	s->far_low = INT64_MAX;
	s->far_high = INT64_MIN;
	for (int64_t k = 0; k < s->ntails; k++) {
		uint64_t word = (uint64_t)s->tail_heads[k], was = offset;
		uint64_t own = s->address + (uint64_t)(s->tails[k] * size);

		offset = (s->is.compound_mask ? word & own : word - 1) - s->address;
		if (offset != was) /* neighbours have the same head, and division is slow */
			head = (int64_t)offset / size - ((int64_t)offset % size < 0);
		s->tail_heads[k] = head;
		if (head < 0 || head >= s->pages) {
			far++;
			s->far_low = head < s->far_low ? head : s->far_low;
			s->far_high = head > s->far_high ? head : s->far_high;
		}
	}
	return far;
}

/* Copy class and mapping of heads to tails, as they were before this step. */
static void settle_tails(struct scan *s)
{
	int copied = 0;

	for (int64_t i = 0; i < s->pages; i++)
		s->heads[i] = (uint32_t)i;
	for (int64_t k = 0; s->far_low == s->far_high && k < s->ntails; k++)
		if (s->tail_heads[k] == s->far_low) {
			s->codes[s->tails[k]] = (uint8_t)s->far_code;
			s->mapping[s->tails[k]] = s->far_mapping;
		}
	memcpy(s->scratch_codes, s->codes, (size_t)s->pages);
	for (int64_t k = 0; k < s->ntails; k++) {
		int64_t head = s->tail_heads[k], tail = s->tails[k];

		if (head < 0 || head >= s->pages) {
			s->heads[tail] = head < 0 ? 0 : (uint32_t)(s->pages - 1);
			continue;
		}
		s->heads[tail] = (uint32_t)head;
		s->codes[tail] = s->scratch_codes[head];
		if (s->codes[tail] != s->is.file)
			continue;
		if (!copied++) {
			own_mapping(s);
			memcpy(s->scratch, s->mapping, (size_t)s->pages * sizeof(uint64_t));
		}
		s->mapping[tail] = s->scratch[head];
	}
}

/* Copy the class of a free block's first page to its other pages. */
static void spread_free(struct scan *s)
{
	const int code = (int)s->is.free_buddy;
	int64_t firsts = 0, filled[MAX_ORDER + 1];
	const uint8_t *end = s->codes + s->pages, *at = s->codes;

	while ((at = memchr(at, code, (size_t)(end - at))))
		s->scratch[firsts++] = (uint64_t)(at++ - s->codes);
	memset(filled, -1, sizeof(filled));
	for (int64_t k = 0; k < firsts; k++) {
		int64_t i = (int64_t)s->scratch[k];
		uint64_t order = u64(page(s, i) + s->is.private);
		int64_t count = (int64_t)1 << (order > MAX_ORDER ? 0 : order);

		if (count == 1 || s->pages % count || s->pfn % (uint64_t)count ||
		    filled[order] == i / count)
			continue;
		filled[order] = i / count;
		memset(s->codes + i / count * count, code, (size_t)count);
	}
}

/*
 * Do the rest of classify(), except gaps. If all heads outside the block are the same
 * one, far_code and far_mapping are its class and mapping; otherwise the caller has set
 * those of the tails already.
 */
void msa_settle(struct scan *s)
{
	const int64_t *end = s->tails + s->ntails, *fake = end - s->nfakes;

	if (s->ntails)
		settle_tails(s);
	spread_free(s);
	for (int64_t k = 0; s->is.hwpoison && k < s->notables; k++) {
		int64_t i = s->notable[k];

		while (fake < end && *fake < i)
			fake++;
		if (u64(page(s, i) + s->is.flags) & s->is.hwpoison &&
		    (fake == end || *fake != i))
			s->codes[i] = (uint8_t)s->is.poisoned;
	}
	for (int64_t k = 0; k < s->zeroes; k++)
		s->codes[s->zeros[k]] = (uint8_t)s->is.excluded;
}

/*
 * Classify the pages of a block. Return the number of tails whose heads are outside the
 * block: if there are any, the caller must call msa_settle(); otherwise all is done.
 */
int64_t msa_classify(struct scan *s, const uint8_t *data, int64_t pages, uint64_t pfn,
		     uint64_t address)
{
	int64_t far;

	s->data = data;
	s->pages = pages;
	s->pfn = pfn;
	s->address = address;
	look_at_each(s);
	compound_heads(s);
	far = find_heads(s);
	if (far)
		own_mapping(s);
	else
		msa_settle(s);
	return far;
}

/* Add page-cache pages to the runs of those with the same mapping. */
static void add_cached(struct scan *s, int64_t first, int64_t end)
{
	/* The mappings are in a separate array or in the struct pages. */
	const uint8_t *array = s->own_mapping ? (const uint8_t *)s->mapping
					      : s->data + s->is.mapping;
	const int64_t step = s->own_mapping ? (int64_t)sizeof(*s->mapping) : s->is.size;
	int64_t n = s->cache_runs;

	for (int64_t i = first, run = first; i < end; i = run) {
		uint64_t mapping = u64(array + i * step);

		while (run < end && u64(array + run * step) == mapping)
			run++;
		if (!n || s->cache_mappings[n - 1] != mapping) {
			s->cache_mappings[n] = mapping;
			s->cache_pages[n++] = 0;
		}
		s->cache_pages[n - 1] += run - i;
	}
	s->cache_runs = n;
}

/* Count unmapped pages, and pages of the swap cache. */
static void add_swappable(struct scan *s, int64_t first, int64_t end, int anon)
{
	const struct layout is = s->is;
	const uint32_t *heads = s->ntails ? s->heads : NULL;

	for (int64_t i = first; i < end; i++) {
		int64_t head = heads ? heads[i] : i;
		uint64_t flags = u64(page(s, head) + is.flags);

		if (anon && u32(page(s, i) + is.mapcount) == UINT32_MAX) {
			int whole = flags & is.head && head + 1 < s->pages &&
				    u32(page(s, head + 1) + is.entire_mapcount) < 1u << 31;

			s->anon_unmapped += !whole;
		}
		if ((flags & is.swapcache) != is.swapcache)
			continue;
		s->anon_swapcache += anon;
		s->shmem_swapcache += !anon;
		s->nameless += anon && !(s->own_mapping ? s->mapping[head]
							: u64(page(s, head) + is.mapping));
	}
}

/* Sum up pages by their current classes: sums.py adds this to the result. */
void msa_sum(struct scan *s, int64_t first, int64_t end)
{
	s->anon_unmapped = s->anon_swapcache = s->shmem_swapcache = 0;
	s->cache_runs = s->nameless = 0;
	memset(s->counts, 0, 256 * sizeof(*s->counts));
	for (int64_t i = first, next; i < end; i = next) {
		uint8_t code = s->codes[i];
		int anon = code == s->is.anon || code == s->is.ksm;

		for (next = i; next + 8 <= end; next += 8)
			if (u64(s->codes + next) != code * 0x0101010101010101u)
				break;
		while (next < end && s->codes[next] == code)
			next++;
		s->counts[code] += next - i;
		if (code == s->is.file)
			add_cached(s, i, next);
		else if (anon || code == s->is.shmem)
			add_swappable(s, i, next, anon);
	}
}

/* The sizes of both structs, for compiled.py to compare with its own. */
int64_t msa_size(void)
{
	return (int64_t)(sizeof(struct layout) << 16 | sizeof(struct scan));
}
