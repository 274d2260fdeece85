# SPDX-License-Identifier: LGPL-2.1-or-later

"""The types of the kernel's variables, which BTF does not describe.

One line for each, by subsystem: the type, the name, and what must be so of a kernel for
the line to hold there, where that differs between kernels; the newest first. Array
lengths are numbers that no configuration changes, or enumerators; where neither tells,
none is given, and the array has no length. ``struct {a b}`` is the one structure that
has no name but just these members. :mod:`msatools.selfdesc.objects` reads them.

The tests hold every line against DWARF on each kernel of the lab.
"""

VARIABLES = """
# Per-CPU variables, for kernels whose BTF lacks them (Debian's 5.10)
struct rcu_data | rcu_data
struct rq | runqueues
struct vm_event_state | vm_event_states
struct kernel_stat | kstat
struct kernel_cpustat | kernel_cpustat
struct context_tracking | context_tracking
irq_cpustat_t | irq_stat
unsigned int | mce_exception_count
unsigned int | mce_poll_count
struct vm_struct *[2] | cached_stacks
struct timer_base [] | timer_bases
struct hrtimer_cpu_base | hrtimer_bases
struct exception_stacks | exception_stacks
struct qnode [4] | qnodes
struct tick_sched | tick_cpu_sched
struct cpuhp_cpu_state | cpuhp_state
struct cpuinfo_x86 | cpu_info
cpumask_var_t | cpu_sibling_map
int | numa_node

# arch/x86
struct cpuinfo_x86 | boot_cpu_data
int | crashing_cpu
gate_desc [256] | idt_table
unsigned long | page_offset_base
struct list_head | pgd_list
unsigned long | vmalloc_base
unsigned long | vmemmap_base

# block
struct list_head | all_blkcgs
struct kmem_cache * | bdev_cachep
struct kobj_map * | bdev_map
struct bio * | bio_dirty_list
struct kmem_cache * | bip_slab
struct kmem_cache * | blk_requestq_cachep
struct kmem_cache * | blk_requestq_srcu_cachep
struct blkcg_policy *[] | blkcg_policy
struct blkcg_policy | blkcg_policy_iocost
struct blkcg_policy | blkcg_policy_throtl
struct blkcg | blkcg_root
struct cgroup_subsys_state * const | blkcg_root_css
const struct class | block_class
struct vfsmount * | blockdev_mnt
struct super_block * | blockdev_superblock
struct list_head | disk_events
struct list_head | elv_list
struct cgroup_subsys | io_cgrp_subsys
struct kmem_cache * | iocontext_cachep
struct blk_major_name *[255] | major_names

# drivers/base
struct kset * | bus_kset
const struct kobj_type | bus_ktype
cpumask_t | cache_dev_map
struct kset * | class_kset
const struct kobj_type | class_ktype
struct hlist_head | clk_orphan_list
struct hlist_head | clk_root_list
struct list_head | deferred_probe_active_list
struct list_head | deferred_probe_pending_list
struct list_head | deferred_sync
const struct kobj_type | device_ktype
struct kset * | devices_kset
struct fs_context_operations | devtmpfs_context_ops
struct list_head | dpm_late_early_list
struct list_head | dpm_list
struct list_head | dpm_noirq_list
struct list_head | dpm_prepared_list
struct list_head | dpm_suspended_list
const struct kobj_type | driver_ktype
struct list_head | input_dev_list
struct list_head | input_handler_list
struct xarray | memory_blocks
struct xarray | memory_groups
const struct bus_type | memory_subsys
struct kset * | module_kset
const struct kobj_type | module_ktype
const struct bus_type | pci_bus_type
struct list_head | pci_root_buses
struct device | platform_bus
int | sections_per_block
struct list_head | syscore_list
struct list_head | syscore_ops_list
struct kset * | system_kset
struct list_head | wakeup_sources

# drivers/cpuidle
struct cpuidle_driver * | cpuidle_curr_driver

# drivers/tty
struct cdev | console_cdev
struct tty_driver * | console_driver
struct tty_ldisc_ops | n_tty_ops
struct tty_driver * | ptm_driver
struct cdev | ptmx_cdev
struct tty_driver * | pts_driver
struct cdev | tty_cdev
struct list_head | tty_drivers
struct ktermios | tty_std_termios

# fs
struct kmem_cache * | aio_inode_cachep
const struct pipe_buf_operations | anon_pipe_buf_ops
struct kmem_cache * | backing_aio_cachep
struct kmem_cache * | bh_cachep
struct hlist_head [128] | blocked_hash
const struct file_operations | bpf_link_fops
const struct file_operations | bpf_map_fops
const struct file_operations | bpf_prog_fops
const struct file_operations | btf_fops
struct kobj_map * | cdev_map
struct char_device_struct *[255] | chrdevs
const struct file_operations | console_fops
char [128] | core_pattern
const struct address_space_operations | def_blk_aops
const struct file_operations | def_blk_fops
const struct file_operations | def_chr_fops
const struct pipe_buf_operations | default_pipe_buf_ops
struct kmem_cache * | dentry_cache
struct hlist_bl_head * | dentry_hashtable
struct dentry_stat_t | dentry_stat
struct kmem_cache * | dio_cache
const struct file_operations | dma_buf_fops
struct fsnotify_group * | dnotify_group
struct kmem_cache * | dnotify_mark_cache
struct kmem_cache * | dnotify_struct_cache
struct hlist_head * | dquot_hash
const struct address_space_operations | empty_aops
struct kmem_cache * | ephead_cache
struct kmem_cache * | epi_cache
const struct file_operations | eventfd_fops
const struct file_operations | eventpoll_fops
const struct file_operations | ext4_file_operations
const struct super_operations | ext4_sops
struct kmem_cache * | fanotify_fid_event_cachep
const struct file_operations | fanotify_fops
struct kmem_cache * | fanotify_mark_cache
struct kmem_cache * | fanotify_mnt_event_cachep
struct kmem_cache * | fanotify_path_event_cachep
struct kmem_cache * | fanotify_perm_event_cachep
struct kmem_cache * | fasync_cache
# A list of its own type until v7.1
struct hlist_head | file_systems | struct file_system_type.list
struct file_system_type * | file_systems | struct file_system_type.next
struct kmem_cache * | filelease_cache
struct kmem_cache * | filelock_cache
struct files_stat_struct | files_stat
struct kmem_cache * | filp_cachep
struct kmem_cache * | flctx_cache
struct list_head | free_dquots
struct mempool | fserror_events_pool
struct kmem_cache * | fsnotify_inode_mark_connector_cachep
struct kmem_cache * | fsnotify_mark_connector_cachep
const struct vm_operations_struct | generic_file_vm_ops
const struct vm_operations_struct | hugetlb_vm_ops
const struct address_space_operations | hugetlbfs_aops
const struct file_operations | hugetlbfs_file_operations
const struct file_operations | hung_up_tty_fops
struct hlist_bl_head [1024] | in_lookup_hashtable
struct files_struct | init_files
struct fs_struct | init_fs
struct fs_struct * | userspace_init_fs
struct mnt_namespace | init_mnt_ns
struct kmem_cache * | inode_cachep
struct hlist_head * | inode_hashtable
struct inodes_stat_t | inodes_stat
const struct file_operations | inotify_fops
struct kmem_cache * | inotify_inode_mark_cachep
struct list_head | inuse_list
struct mnt_idmap | invalid_mnt_idmap
const struct file_operations | io_uring_fops
struct list_head | kclist_head
struct kcore_list | kcore_modules
struct kcore_list | kcore_text
struct kcore_list | kcore_vmalloc
const struct file_operations | kernfs_dir_fops
const struct file_operations | kernfs_file_fops
struct kmem_cache * | kernfs_iattrs_cache
struct kernfs_global_locks * | kernfs_locks
struct kmem_cache * | kernfs_node_cache
struct kernfs_node * | kernfs_notify_list
struct kmem_cache * | kiocb_cachep
struct kmem_cache * | kioctx_cachep
struct kmem_cache * | mb_entry_cache
const struct file_operations | memory_fops
struct kmem_cache * | mnt_cache
struct xarray | mnt_id_xa
# A bare tree until v6.18
struct ns_tree_root | mnt_ns_tree
struct rb_root | mnt_ns_tree | !struct ns_tree_root
struct hlist_head * | mount_hashtable
struct hlist_head * | mountpoint_hashtable
const struct file_operations | mqueue_file_operations
struct kmem_cache * | names_cachep
struct mnt_idmap | nop_mnt_idmap
const struct pipe_buf_operations | nosteal_pipe_buf_ops
struct percpu_counter | nr_files
const struct dentry_operations | ns_dentry_operations
const struct file_operations | ns_file_operations
const struct file_operations | null_fops
const struct pipe_buf_operations | page_cache_pipe_buf_ops
struct kmem_cache * | pde_opener_cache
const struct file_operations | perf_fops
const struct file_operations | pidfd_fops
struct kmem_cache * | pidfs_attr_cachep
const struct file_operations | pidfs_file_operations
struct gen_cookie | pidfs_ino_cookie
struct rhashtable | pidfs_ino_ht
struct vfsmount * | pidfs_mnt
struct path | pidfs_root_path
struct simple_xattr_cache | pidfs_xa_cache
struct vfsmount * | pipe_mnt
const struct file_operations | pipeanon_fops
const struct file_operations | pipefifo_fops
const struct super_operations | pipefs_ops
struct kmem_cache * | proc_dir_entry_cache
struct kmem_cache * | proc_inode_cachep
struct proc_dir_entry | proc_root
struct proc_dir_entry * | proc_root_kcore
const struct super_operations | proc_sops
const struct file_operations | proc_sys_file_operations
const struct address_space_operations | ram_aops
const struct file_operations | ramfs_file_operations
const struct file_operations | random_fops
const struct file_operations | secretmem_fops
struct kmem_cache * | seq_file_cache
const struct file_operations | shm_file_operations
const struct file_operations | shm_file_operations_huge
const struct address_space_operations | shmem_aops
const struct file_operations | shmem_file_operations
const struct inode_operations | shmem_inode_operations
const struct super_operations | shmem_ops
const struct vm_operations_struct | shmem_vm_ops
const struct file_operations | signalfd_fops
const struct file_operations | socket_file_ops
const struct super_operations | sockfs_ops
const struct vm_operations_struct | special_mapping_vmops
int | suid_dumpable
struct list_head | super_blocks
const struct address_space_operations | swap_aops
unsigned int | sysctl_nr_open
struct kernfs_node * | sysfs_root_kn
const struct file_operations | timerfd_fops
const struct file_operations | tty_fops
const struct file_operations | urandom_fops
const struct pipe_buf_operations | user_page_pipe_buf_ops
const struct file_operations | userfaultfd_fops
const struct file_operations | zero_fops

# init
dev_t | ROOT_DEV
struct sighand_struct | init_sighand
struct signal_struct | init_signals
struct task_struct | init_task
struct task_exec_state | init_task_exec_state
struct uts_namespace | init_uts_ns

# ipc
struct ipc_namespace | init_ipc_ns
int | ipc_mni_shift
struct kmem_cache * | mqueue_inode_cachep
kmem_buckets * | msg_buckets

# kernel
struct cpumask | __cpu_active_mask
struct cpumask | __cpu_dying_mask
struct cpumask | __cpu_enabled_mask
struct cpumask | __cpu_online_mask
struct cpumask | __cpu_possible_mask
struct cpumask | __cpu_present_mask
struct {hashmask hashshift queues} | __futex_data
struct {queues hashsize} | __futex_data
u32 | __futex_mask
struct futex_hash_bucket ** | __futex_queues
struct async_domain | async_dfl_domain
u32 | audit_enabled
struct pid * | cad_pid
struct ns_tree_root | cgroup_ns_tree
const unsigned long [] | cpu_all_bits
int | cpu_hotplug_disabled
enum cpuhp_smt_control | cpu_smt_control
struct smp_hotplug_thread | cpu_stop_threads
struct cpuhp_step [] | cpuhp_hp_states
struct smp_hotplug_thread | cpuhp_threads
cpumask_t | cpus_booted_once_mask
note_buf_t * | crash_notes
struct kmem_cache * | cred_jar
struct kmem_cache * | delayacct_cache
struct static_key_false | delayacct_key
int | delayacct_on
struct kmem_cache * | files_cachep
cpumask_var_t | frozen_cpus
struct kmem_cache * | fs_cachep
struct list_head | hotplug_threads
struct binfmt_misc | init_binfmt_misc
struct cred | init_cred
struct group_info | init_groups
struct nsproxy | init_nsproxy
struct pid_namespace | init_pid_ns
struct pid | init_struct_pid
struct ucounts | init_ucounts
struct user_namespace | init_user_ns
struct resource | ioport_resource
struct ns_tree_root | ipc_ns_tree
struct kimage * | kexec_crash_image
struct kimage * | kexec_image
struct wait_queue_head | kmod_wq
struct list_head | kthread_affinity_list
struct list_head | kthread_create_list
const char [] | linux_banner
const char [] | linux_proc_banner
int | max_threads
struct kmem_cache * | mm_cachep
struct ns_tree_root | net_ns_tree
unsigned int | nr_cpu_ids
int | nr_threads
struct ns_tree_root | ns_unified_root
struct kmem_cache * | nsproxy_cachep
atomic_t | panic_cpu
int | panic_on_oops
int | panic_timeout
struct kmem_cache *[32] | pid_cache
int | pid_max
struct kmem_cache * | pid_ns_cachep
struct ns_tree_root | pid_ns_tree
cpumask_var_t | rcu_nocb_mask
struct user_struct | root_user
char * | saved_command_line
struct kmem_cache * | sighand_cachep
struct kmem_cache * | signal_cachep
struct kmem_cache * | sigqueue_cachep
struct smp_hotplug_thread | softirq_threads
const char *const [NR_SOFTIRQS] | softirq_to_name
struct softirq_action [NR_SOFTIRQS] | softirq_vec
unsigned int | softlockup_panic
unsigned long | sysctl_hung_task_timeout_secs
const struct taint_flag [] | taint_flags
unsigned long | tainted_mask
struct kmem_cache * | task_exec_state_cachep
struct kmem_cache * | task_struct_cachep
struct kmem_cache * | taskstats_cache
struct ns_tree_root | time_ns_tree
struct smp_hotplug_thread | timer_thread
unsigned long | total_forks
# Looked up under RCU since v6.15
struct hlist_nulls_head [1024] | ucounts_hashtable | struct ucounts.rcu
struct hlist_head [1024] | ucounts_hashtable | !struct ucounts.rcu
struct kmem_cache * | uid_cachep
struct hlist_head [128] | uidhash_table
struct hlist_head [64] | unbound_pool_hash
struct kmem_cache * | user_ns_cachep
struct ns_tree_root | user_ns_tree
kernel_cap_t | usermodehelper_bset
kernel_cap_t | usermodehelper_inheritable
struct kmem_cache * | uts_ns_cache
struct ns_tree_root | uts_ns_tree
const char [] | vermagic
struct kmem_cache * | vm_area_cachep
struct kmem_cache * | vma_lock_cachep
struct cpumask | watchdog_allowed_mask
struct cpumask | watchdog_cpumask
unsigned long * | watchdog_cpumask_bits
unsigned long | watchdog_enabled
int | watchdog_thresh
struct idr | worker_pool_idr
struct list_head | workqueues
cpumask_var_t | wq_isolated_cpumask
cpumask_var_t * | wq_numa_possible_cpumask
cpumask_var_t | wq_online_cpumask
struct wq_pod_type [WQ_AFFN_NR_TYPES] | wq_pod_types
cpumask_var_t | wq_requested_unbound_cpumask
cpumask_var_t | wq_unbound_cpumask

# kernel/bpf
struct idr | btf_idr
struct list_head | btf_modules
struct idr | link_idr
struct idr | map_idr
struct idr | prog_idr

# kernel/cgroup
cpumask_var_t | boot_hk_cpus
struct kernfs_syscall_ops | cgroup1_kf_syscall_ops
struct idr | cgroup_hierarchy_idr
struct kernfs_ops | cgroup_kf_ops
struct kernfs_ops | cgroup_kf_single_ops
struct kernfs_syscall_ops | cgroup_kf_syscall_ops
struct list_head | cgroup_roots
struct cgroup_subsys *[CGROUP_SUBSYS_COUNT] | cgroup_subsys
struct cgroup_root | cgrp_dfl_root
struct cgroup_subsys | cpuset_cgrp_subsys
struct hlist_head [128] | css_set_table
struct cgroup_subsys | devices_cgrp_subsys
struct cgroup_subsys | freezer_cgrp_subsys
struct cgroup_namespace | init_cgroup_ns
struct css_set | init_css_set
cpumask_var_t | isolated_cpus
cpumask_var_t | isolated_hk_cpus
struct cgroup_subsys | misc_cgrp_subsys
struct cgroup_subsys | net_cls_cgrp_subsys
struct cgroup_subsys | net_prio_cgrp_subsys
struct cgroup_subsys | perf_event_cgrp_subsys
const char *const [] | perr_strings
struct cgroup_subsys | pids_cgrp_subsys
struct cgroup_subsys | rdma_cgrp_subsys
struct list_head | rdmacg_devices
cpumask_var_t | subpartitions_cpus
struct cpuset | top_cpuset

# kernel/irq
struct irqaction | chained_action
struct irq_chip | dummy_irq_chip
cpumask_var_t | irq_default_affinity
struct irq_domain * | irq_default_domain
struct xarray | irq_desc_tree
struct list_head | irq_domain_list
struct hlist_head | irq_resend_list
struct msi_domain_ops | msi_domain_ops_default
struct irq_chip | no_irq_chip
int | nr_irqs
unsigned int | total_nr_irqs
struct timer_list | poll_spurious_irq_timer
struct proc_dir_entry * | root_irq_dir
struct maple_tree | sparse_irqs

# kernel/module
struct mod_tree_root | mod_tree
struct wait_queue_head | module_wq
struct list_head | modules

# kernel/printk
struct console * | console_drivers
struct hlist_head | console_list
struct semaphore | console_sem
char * | log_buf
struct printk_ringbuffer * | prb
struct printk_ringbuffer | printk_rb_dynamic
struct printk_ringbuffer | printk_rb_static

# kernel/sched
struct list_head | asym_cap_list
struct autogroup | autogroup_default
u64 | __gtod_offset
u64 | __sched_clock_offset
unsigned long [3] | avenrun
wait_queue_head_t [256] | bit_wait_table
atomic_long_t [2] | calc_load_nohz
atomic_long_t | calc_load_tasks
unsigned long | calc_load_update
struct cgroup_subsys | cpu_cgrp_subsys
struct cgroup_subsys | cpuacct_cgrp_subsys
struct root_domain | def_root_domain
struct rt_bandwidth | def_rt_bandwidth
const struct sched_class | dl_sched_class
cpumask_var_t * | doms_cur
const struct sched_class | ext_sched_class
const struct sched_class | fair_sched_class
struct housekeeping | housekeeping
unsigned int | housekeeping_flags
cpumask_var_t | housekeeping_mask
struct static_key_false | housekeeping_overridden
const struct sched_class | idle_sched_class
struct static_key_true | psi_cgroups_enabled
struct static_key_false | psi_disabled
struct psi_group | psi_system
struct cpuacct | root_cpuacct
struct task_group | root_task_group
const struct sched_class | rt_sched_class
struct sched_domain_topology_level * | sched_domain_topology
struct sched_domain_topology_level * | sched_domain_topology_saved
cpumask_var_t | sched_domains_llc_id_allocmask
int * | sched_domains_numa_distance
struct cpumask *** | sched_domains_numa_masks
const char *const [__SCHED_FEAT_NR] | sched_feat_names
struct static_key_false | sched_numa_balancing
int * | sched_numa_node_distance
struct static_key_false | sched_schedstats
bool | sched_smp_initialized
struct cpufreq_governor | schedutil_gov
s16 * | scx_cid_to_cpu_tbl
struct scx_cid_topo * | scx_cid_topo
s16 * | scx_cpu_to_cid_tbl
struct scx_sched * | scx_enabling_sub_sched
struct scx_idle_cpus | scx_idle_global_masks
struct scx_idle_cpus ** | scx_idle_node_masks
struct kset * | scx_kset
struct scx_sched * | scx_root
struct list_head | scx_sched_all
struct rhashtable | scx_sched_hash
struct list_head | scx_tasks
struct rhashtable | scx_tid_hash
struct wait_queue_head | scx_unlink_waitq
cpumask_var_t | sd_sysctl_cpus
const struct sched_class | stop_sched_class
int | sysctl_sched_rt_runtime
struct kmem_cache * | task_group_cache
struct list_head | task_groups
const char *const [9] | task_state_array

# kernel/time
struct clock_event_device | ce_broadcast_hrtimer
struct list_head | clockevent_devices
struct list_head | clockevents_released
struct clocksource | clocksource_jiffies
struct list_head | clocksource_list
struct clocksource * | curr_clocksource
struct device | device_clocksource
struct clocksource | dummy_clock
struct time_namespace | init_time_ns
u64 | jiffies_64
ktime_t | last_jiffies_update
time64_t | ntp_next_leap_sec
bool | persistent_clock_exists
struct kmem_cache * | posix_timers_cache
struct clocksource | refined_jiffies
struct timekeeper | shadow_timekeeper
struct clocksource * | suspend_clocksource
struct timezone | sys_tz
struct device | tick_bc_dev
struct tick_device | tick_broadcast_device
cpumask_var_t | tick_broadcast_force_mask
cpumask_var_t | tick_broadcast_mask
cpumask_var_t | tick_broadcast_on
cpumask_var_t | tick_broadcast_oneshot_mask
cpumask_var_t | tick_broadcast_pending_mask
int | tick_do_timer_cpu
cpumask_var_t | tick_nohz_full_mask
struct tk_data [TIMEKEEPERS_MAX] | timekeeper_data
struct timespec64 | timekeeping_suspend_time
int | timekeeping_suspended
struct tk_data | tk_core
struct {seq timekeeper} | tk_core
struct tk_fast | tk_fast_mono
struct tk_fast | tk_fast_raw
cpumask_var_t | tmigr_available_cpumask
struct list_head | tmigr_hierarchy_list
struct list_head * | tmigr_level_list

# kernel/trace
struct ftrace_page * | ftrace_pages_start

# lib
struct list_head | module_bug_list
struct list_head | percpu_counters
void *[] | stack_slabs
# A table of lists since v6.8
struct stack_record ** | stack_table | struct stack_record.next
struct list_head * | stack_table | !struct stack_record.next
struct list_head | uevent_sock_list

# mm
unsigned long | __highest_present_section_nr
unsigned long [] | __per_cpu_offset
struct page * | __zero_page
atomic_long_t | _totalram_pages
struct advisor_ctx | advisor_ctx
struct saved_alias * | alias_list
struct kmem_cache * | anon_vma_cachep
struct kmem_cache * | anon_vma_chain_cachep
struct list_head | bdi_list
struct rb_root | bdi_tree
struct cma [] | cma_areas
compound_page_dtor *const [NR_COMPOUND_DTORS] | compound_page_dtors
struct access_coordinate | default_dram_perf
struct memory_dev_type * | default_dram_type
struct execmem_info | default_execmem_info
struct list_head | default_memory_types
struct mempolicy | default_policy
struct list_lru | deferred_split_lru
struct mminit_pfnnid_cache | early_pfnnid_cache
struct execmem_cache | execmem_cache
struct list_head | free_vmap_area_list
struct rb_root | free_vmap_area_root
struct frontswap_ops * | frontswap_ops
const struct trace_print_flags [] | gfpflag_names
struct wb_domain | global_wb_domain
struct kmem_cache * | handle_cachep
void * | high_memory
struct hstate [] | hstates
struct folio * | huge_zero_folio
struct page * | huge_zero_page
unsigned long | huge_zero_pfn
struct cgroup_subsys | hugetlb_cgrp_subsys
struct mutex * | hugetlb_fault_mutex_table
int | hugetlb_max_hstate
hwpoison_filter_func_t * | hwpoison_filter_func
struct mm_struct | init_mm
u8 * | iw_table
struct collapse_control | khugepaged_collapse_control
unsigned int | khugepaged_pages_collapsed
struct khugepaged_scan | khugepaged_scan
struct wait_queue_head | khugepaged_wait
struct kmem_cache * | kmem_buckets_cache
struct kmem_cache * | kmem_cache
struct kmem_cache * | kmem_cache_node
struct wait_queue_head | ksm_iter_wait
struct mm_walk_ops | ksm_next_page_ops
unsigned long | ksm_pages_shared
unsigned long | ksm_pages_sharing
unsigned long | ksm_run
struct ksm_scan | ksm_scan
struct wait_queue_head | ksm_thread_wait
unsigned long | max_low_pfn
unsigned long | max_pfn
unsigned long long | max_possible_pfn
struct idr | mem_cgroup_idr
struct xarray | mem_cgroup_ids
struct xarray | mem_cgroup_private_ids
struct mem_section ** | mem_section
struct memblock | memblock
struct memblock_type * | memblock_memory
struct kmem_cache * | memcg_cachep
struct wait_queue_head | memcg_cgwb_frn_waitq
struct list_head | memcg_list_lrus
struct wait_queue_head | memcg_oom_waitq
struct kmem_cache * | memcg_pn_cachep
struct cgroup_subsys | memory_cgrp_subsys
struct list_head | memory_tiers
struct list_head | migrate_nodes
const char *const [MIGRATE_TYPES] | migratetype_names
int | min_free_kbytes
unsigned long | min_low_pfn
struct iw_node_attr ** | node_attrs
unsigned int * | node_bw_table
struct pglist_data *[] | node_data
struct demotion_nodes * | node_demotion
struct node_hstate [] | node_hstates
int [] | node_load
nodemask_t [NR_NODE_STATES] | node_states
struct backing_dev_info | noop_backing_dev_info
unsigned int | nr_node_ids
atomic_long_t | nr_swap_pages
unsigned int | nr_swapfiles
unsigned int [] | nr_swapper_spaces
atomic_long_t | nr_vmalloc_pages
unsigned int | nr_vmap_nodes
unsigned int [] | nr_zswap_trees
atomic_long_t | num_poisoned_pages
struct numa_meminfo | numa_reserved_meminfo
struct list_head | offline_cgwbs
const struct movable_operations * | offline_movable_ops
online_page_callback_t | online_page_callback
struct wait_queue_head | oom_reaper_wait
struct wait_queue_head | oom_victims_wait
int | page_group_by_mobility_disabled
void * | pcpu_base_addr
struct list_head * | pcpu_chunk_lists
struct pcpu_chunk * | pcpu_first_chunk
const unsigned long * | pcpu_group_offsets
const size_t * | pcpu_group_sizes
unsigned long | pcpu_nr_populated
int | pcpu_nr_slots
int | pcpu_nr_units
struct pcpu_chunk * | pcpu_reserved_chunk
const int * | pcpu_unit_map
const unsigned long * | pcpu_unit_offsets
int | pcpu_unit_pages
struct rb_root_cached | pfn_space_itree
struct xarray | pgmap_array
struct kmem_cache * | policy_cache
struct page_reporting_dev_info * | pr_dev_info
struct mempolicy [] | preferred_node_policy
struct wait_queue_head | proc_poll_wait
cpumask_t | purge_nodes
struct list_head | purge_vmap_area_list
struct rb_root | purge_vmap_area_root
struct kmem_cache * | rmap_item_cache
struct hugetlb_cgroup * | root_h_cgroup
struct mem_cgroup * | root_mem_cgroup
struct rb_root * | root_stable_tree
struct rb_root * | root_unstable_tree
struct vfsmount * | secretmem_mnt
struct list_lru | shadow_nodes
struct vfsmount * | shm_mnt
struct kmem_cache * | shmem_inode_cachep
struct list_head | shmem_swaplist
struct idr | shrinker_idr
struct list_head | shrinker_list
struct vmap_node | single
mempool_t * | sio_pool
nodemask_t | slab_barn_nodes
struct list_head | slab_caches
struct list_head | slab_caches_to_rcu_destroy
struct kset * | slab_kset
nodemask_t | slab_nodes
slab_flags_t | slub_debug
struct kmem_cache * | sn_cache
struct mem_cgroup_tree | soft_limit_tree
void * | sparse_usagebuf
void * | sparse_usagebuf_end
void * | sparsemap_buf
void * | sparsemap_buf_end
struct kmem_cache * | stable_node_cache
struct plist_head | swap_active_head
struct plist_head | swap_avail_head
struct plist_head * | swap_avail_heads
struct swap_cgroup_ctrl [] | swap_cgroup_ctrl
struct swap_info_struct *[] | swap_info
struct address_space | swap_space
struct wait_queue_head | swapcache_wq
struct address_space *[] | swapper_spaces
int [__MAX_NR_ZONES] | sysctl_lowmem_reserve_ratio
unsigned long | sysctl_overcommit_kbytes
int | sysctl_overcommit_memory
int | sysctl_overcommit_ratio
struct list_head | thpsize_list
long | total_swap_pages
unsigned long | totalreserve_pages
kmem_buckets * | user_buckets
struct percpu_counter | vm_committed_as
s32 | vm_committed_as_batch
atomic_long_t [NR_VM_NODE_STAT_ITEMS] | vm_node_stat
atomic_long_t [NR_VM_NUMA_EVENT_ITEMS] | vm_numa_event
atomic_long_t [NR_VM_NUMA_STAT_ITEMS] | vm_numa_stat
int | vm_swappiness
atomic_long_t [NR_VM_ZONE_STAT_ITEMS] | vm_zone_stat
struct kmem_cache * | vmap_area_cachep
struct list_head | vmap_area_list
struct rb_root | vmap_area_root
struct xarray | vmap_blocks
struct vmap_node * | vmap_nodes
unsigned int | vmap_zone_size
int | watermark_scale_factor
struct sysfs_wi_group * | wi_group
struct weighted_interleave_state * | wi_state
char *const [__MAX_NR_ZONES] | zone_names
const struct movable_operations * | zsmalloc_movable_ops
struct kmem_cache * | zspage_cachep
struct kmem_cache * | zswap_entry_cache
struct list_lru | zswap_list_lru
struct mem_cgroup * | zswap_next_shrink
struct list_head | zswap_pools
struct zswap_tree *[] | zswap_trees | struct zswap_tree
struct xarray *[] | zswap_trees | !struct zswap_tree

# net
struct neigh_table | arp_tbl
struct hlist_head [256] | bsd_socket_buckets
spinlock_t [256] | bsd_socket_locks
const struct net_offload *[256] | inet_offloads
struct list_head [11] | inetsw
struct list_head [11] | inetsw6
struct hlist_head [256] | napi_hash
struct neigh_table | nd_tbl
struct neigh_table *[NEIGH_NR_TABLES] | neigh_tables
const struct net_proto_family *[] | net_families
struct list_head [16] | ptype_base
struct proto | rawv6_prot
struct rtnl_link **[] | rtnl_msg_handlers
struct kmem_cache * | sock_inode_cachep
struct vfsmount * | sock_mnt
struct simple_xattr_cache | sockfs_xa_cache
long [3] | sysctl_tcp_mem
long [3] | sysctl_udp_mem
struct proto | tcp_prot
struct proto | tcpv6_prot
struct proto | udpv6_prot
struct proto | unix_proto
struct hlist_head [512] | unix_socket_table

# net/core
struct smp_hotplug_thread | backlog_threads
const struct skb_checksum_ops * | crc32c_csum_stub
struct sk_buff * | defer_kfree_skb_list
struct dst_ops | dst_blackhole_ops
struct list_head * | first_device
struct flush_backlogs * | flush_backlogs_fallback
struct net | init_net
struct key_tag | init_net_key_domain
struct list_head | link_ops
struct metadata_dst * | md_dst
struct kmem_cache * | net_cachep
struct gen_cookie | net_cookie
struct list_head | net_namespace_list
struct list_head | net_todo_list
struct list_head | pernet_list
struct list_head | proto_list
struct list_head | ptype_all
struct rps_sock_flow_table * | rps_sock_flow_table
struct list_head | rtnl_af_ops
struct kmem_cache * | skbuff_ext_cache
struct kmem_cache * | skbuff_fclone_cache
struct kmem_cache * | skbuff_head_cache
__u32 | sysctl_rmem_default
__u32 | sysctl_rmem_max
__u32 | sysctl_wmem_default
__u32 | sysctl_wmem_max
struct metadata_dst * | xfrm_bpf_md_dst

# security
struct lsm_blob_sizes | blob_sizes
struct key_type * | key_gc_dead_keytype
time64_t | key_gc_next_run
struct kmem_cache * | key_jar
struct rb_root | key_serial_tree
struct key_type | key_type_dead
struct key_type | key_type_keyring
struct list_head | key_types_list
struct rb_root | key_user_tree
struct kmem_cache * | lsm_backing_file_cache
struct kmem_cache * | lsm_file_cache
struct kmem_cache * | lsm_inode_cache
struct key_user | root_key_user
struct security_hook_heads | security_hook_heads
"""
