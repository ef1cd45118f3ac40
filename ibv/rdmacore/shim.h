/*
 * What this package needs of libibverbs and librdmacm, declared here so that
 * neither their headers nor the libraries are needed to build. The layouts are
 * the stable ABI of libibverbs.so.1 (IBVERBS_1.1) and librdmacm.so.1
 * (RDMACM_1.0); the names start with rn_, so that a test can compile this file
 * beside the real headers and compare. Of structures that the libraries
 * allocate only the beginning is declared.
 */
#ifndef RDMANET_SHIM_H
#define RDMANET_SHIM_H

#include <stddef.h>
#include <stdint.h>

struct rn_context;
struct rn_qp;
struct rn_cq;
struct rn_wc;
struct rn_send_wr;
struct rn_recv_wr;

struct rn_device {
	void *ops[2];
	int32_t node_type;
	int32_t transport_type;
	char name[64];
	char dev_name[64];
	char dev_path[256];
	char ibdev_path[256];
};

/* The functions that verbs.h calls through the context, in their places. */
struct rn_context_ops {
	void *before_poll[11];
	int (*poll_cq)(struct rn_cq *, int, struct rn_wc *);
	int (*req_notify_cq)(struct rn_cq *, int);
	void *between[12];
	int (*post_send)(struct rn_qp *, struct rn_send_wr *, struct rn_send_wr **);
	int (*post_recv)(struct rn_qp *, struct rn_recv_wr *, struct rn_recv_wr **);
	void *after_post[5];
};

struct rn_context {
	struct rn_device *device;
	struct rn_context_ops ops;
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
};

struct rn_comp_channel {
	struct rn_context *context;
	int fd;
	int refcnt;
};

struct rn_cq {
	struct rn_context *context;
	struct rn_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct rn_qp {
	struct rn_context *context;
	void *qp_context;
	void *pd;
	struct rn_cq *send_cq;
	struct rn_cq *recv_cq;
	void *srq;
	uint32_t handle;
	uint32_t qp_num;
	uint32_t state;
	uint32_t qp_type;
};

struct rn_mr {
	struct rn_context *context;
	void *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct rn_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct rn_send_wr {
	uint64_t wr_id;
	struct rn_send_wr *next;
	struct rn_sge *sg_list;
	int num_sge;
	uint32_t opcode;
	uint32_t send_flags;
	uint32_t imm_or_key; /* immediate in network order, or the key to invalidate */
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr;
			uint64_t compare_add;
			uint64_t swap;
			uint32_t rkey;
		} atomic;
		struct {
			void *ah;
			uint32_t remote_qpn;
			uint32_t remote_qkey;
		} ud;
	} wr;
	uint32_t xrc_srqn;
	uint64_t bind_mw[6];
};

struct rn_recv_wr {
	uint64_t wr_id;
	struct rn_recv_wr *next;
	struct rn_sge *sg_list;
	int num_sge;
};

struct rn_wc {
	uint64_t wr_id;
	uint32_t status;
	uint32_t opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_or_key;
	uint32_t qp_num;
	uint32_t src_qp;
	uint32_t wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct rn_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct rn_qp_init_attr {
	void *qp_context;
	struct rn_cq *send_cq;
	struct rn_cq *recv_cq;
	void *srq;
	struct rn_qp_cap cap;
	uint32_t qp_type;
	int sq_sig_all;
};

struct rn_ah_attr {
	uint8_t dgid[16] __attribute__((aligned(8)));
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
	uint16_t dlid __attribute__((aligned(8)));
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct rn_qp_attr {
	uint32_t qp_state;
	uint32_t cur_qp_state;
	uint32_t path_mtu;
	uint32_t path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	uint32_t qp_access_flags;
	struct rn_qp_cap cap;
	struct rn_ah_attr ah_attr;
	struct rn_ah_attr alt_ah_attr;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port_num;
	uint8_t alt_timeout;
	uint32_t rate_limit;
};

struct rn_device_attr {
	char fw_ver[64];
	uint64_t node_guid; /* network order */
	uint64_t sys_image_guid;
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	int max_qp;
	int max_qp_wr;
	uint32_t device_cap_flags;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	int max_pd;
	int max_qp_rd_atom;
	int max_ee_rd_atom;
	int max_res_rd_atom;
	int max_qp_init_rd_atom;
	int max_ee_init_rd_atom;
	uint32_t atomic_cap;
	int max_ee;
	int max_rdd;
	int max_mw;
	int max_raw_ipv6_qp;
	int max_raw_ethy_qp;
	int max_mcast_grp;
	int max_mcast_qp_attach;
	int max_total_mcast_qp_attach;
	int max_ah;
	int max_fmr;
	int max_map_per_fmr;
	int max_srq;
	int max_srq_wr;
	int max_srq_sge;
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay;
	uint8_t phys_port_cnt;
};

/* The exported ibv_query_port fills in no more than this. */
struct rn_port_attr {
	uint32_t state;
	uint32_t max_mtu;
	uint32_t active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags;
	uint32_t max_msg_sz;
	uint32_t bad_pkey_cntr;
	uint32_t qkey_viol_cntr;
	uint16_t pkey_tbl_len;
	uint16_t lid;
	uint16_t sm_lid;
	uint8_t lmc;
	uint8_t max_vl_num;
	uint8_t sm_sl;
	uint8_t subnet_timeout;
	uint8_t init_type_reply;
	uint8_t active_width;
	uint8_t active_speed;
	uint8_t phys_state;
	uint8_t link_layer;
	uint8_t flags;
	uint16_t room;
};

struct rn_async_event {
	union {
		struct rn_cq *cq;
		struct rn_qp *qp;
		int port_num;
	} element;
	uint32_t event_type;
};

struct rn_event_channel {
	int fd;
};

/* The way to a peer as librdmacm unpacks it; __be fields are in network order. */
struct rn_path_rec {
	uint8_t dgid[16] __attribute__((aligned(8)));
	uint8_t sgid[16] __attribute__((aligned(8)));
	uint16_t dlid; /* be */
	uint16_t slid; /* be */
	int raw_traffic;
	uint32_t flow_label; /* be */
	uint8_t hop_limit;
	uint8_t traffic_class;
	int reversible;
	uint8_t numb_path;
	uint16_t pkey; /* be */
	uint8_t sl;
	uint8_t mtu_selector;
	uint8_t mtu;
	uint8_t rate_selector;
	uint8_t rate;
	uint8_t packet_life_time_selector;
	uint8_t packet_life_time;
	uint8_t preference;
};

/* And as rdma_set_option takes it, struct ibv_path_data. */
struct rn_path_data {
	uint32_t flags;
	uint32_t reserved;
	struct {
		uint64_t service_id;
		uint8_t dgid[16];
		uint8_t sgid[16];
		uint16_t dlid;
		uint16_t slid;
		uint32_t flowlabel_hoplimit;
		uint8_t tclass;
		uint8_t reversible_numpath;
		uint16_t pkey;
		uint16_t qosclass_sl;
		uint8_t mtu;
		uint8_t rate;
		uint8_t packetlifetime;
		uint8_t preference;
		uint8_t reserved[6];
	} path;
};

struct rn_cm_id {
	struct rn_context *verbs;
	struct rn_event_channel *channel;
	void *context;
	struct rn_qp *qp;
	uint8_t src_storage[128] __attribute__((aligned(8)));
	uint8_t dst_storage[128] __attribute__((aligned(8)));
	uint8_t ibaddr[40] __attribute__((aligned(8)));
	struct rn_path_rec *path_rec;
	int num_paths;
	int end_of_route;
	uint32_t ps;
	uint8_t port_num;
};

struct rn_conn_param {
	const void *private_data;
	uint8_t private_data_len;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint32_t qp_num;
};

struct rn_ud_param {
	const void *private_data;
	uint8_t private_data_len;
	struct rn_ah_attr ah_attr;
	uint32_t qp_num;
	uint32_t qkey;
};

struct rn_join_mc_attr {
	uint32_t comp_mask;
	uint32_t join_flags;
	void *addr;
};

struct rn_cm_event {
	struct rn_cm_id *id;
	struct rn_cm_id *listen_id;
	uint32_t event;
	int status;
	union {
		struct rn_conn_param conn;
		struct rn_ud_param ud;
	} param;
};

/* From here on the package's own. All functions return 0 or more, or -errno. */

/* One work request as Go hands it over: no pointers, elements in one array. */
struct rn_wr {
	uint64_t id;
	uint64_t remote_addr; /* of a datagram: its address handle */
	uint64_t compare_add;
	uint64_t swap;
	uint32_t rkey; /* of a datagram: the queue pair that it is for */
	uint32_t imm_or_key;
	uint32_t opcode;
	uint32_t flags;
	uint32_t num_sge;
	uint32_t qkey;
};

/* What an event of the connection manager says, by value. */
struct rn_event_info {
	struct rn_cm_id *id;
	uintptr_t handle;
	uintptr_t listen_handle; /* 0 unless this is a connection request */
	uintptr_t group; /* of an event of multicast: what was given to rn_join_multicast */
	uint32_t event;
	int32_t status;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t private_len;
	uint32_t qp_num; /* this and the next two in the port space of UDP */
	uint32_t qkey;
	struct rn_ah_attr ah_attr;
	uint8_t private_data[255];
};

/* What an asynchronous event of a device says. */
struct rn_async_info {
	uint32_t event;
	uint32_t port;
	uintptr_t handle; /* of the queue or queue pair, 0 where it is about neither */
};

int rn_load(const char *verbs, const char *cm, char *problem, size_t len);

int rn_devices(struct rn_context ***list, int *n);
void rn_free_devices(struct rn_context **list);
int rn_query_device(struct rn_context *c, struct rn_device_attr *attr);
int rn_query_port(struct rn_context *c, int port, struct rn_port_attr *attr);
int rn_query_gid(struct rn_context *c, int port, int index, uint8_t gid[16]);
int rn_probe_inline(struct rn_context *c, int qp_type);
int rn_occupy(struct rn_context *c, int depth);
int rn_async_event(struct rn_context *c, struct rn_async_info *info);
int rn_nonblocking(int fd);

int rn_alloc_pd(struct rn_context *c, void **pd);
int rn_dealloc_pd(void *pd);
int rn_reg_mr(void *pd, uintptr_t addr, size_t len, int access, struct rn_mr **mr);
int rn_dereg_mr(struct rn_mr *mr);

int rn_create_cq(struct rn_context *c, int depth, int vector, uintptr_t handle, struct rn_cq **cq);
int rn_destroy_cq(struct rn_cq *cq, unsigned int events, int fd_closed);
void rn_ack_cq(struct rn_cq *cq, unsigned int events);

int rn_create_qp(struct rn_cm_id *id, void *pd, uintptr_t handle, struct rn_cq *send_cq,
		 struct rn_cq *recv_cq, int qp_type, int signal_all, struct rn_qp_cap *cap);
void rn_destroy_qp(struct rn_qp *qp);
int rn_qp_state(struct rn_qp *qp);
int rn_siw_reads(struct rn_qp *qp);
int rn_qp_error(struct rn_qp *qp);
int rn_qp_rnr_timer(struct rn_qp *qp, int timer);
int rn_qp_path_mtu(struct rn_qp *qp);

/*
 * What every message takes. Go calls it by package ccall, with one of these
 * structures, or the queue, as its argument.
 */
struct rn_poll {
	struct rn_cq *cq;
	struct rn_wc *wcs;
	int n;
};

struct rn_arm {
	struct rn_cq *cq;
	int solicited;
};

struct rn_post {
	struct rn_qp *qp;
	const struct rn_wr *wrs;
	const struct rn_sge *sges; /* of all of them, one after the other */
	int n;
	int posted; /* set */
};

/* The file of the library with the device's driver in user space, or "". */
const char *rn_driver(struct rn_context *c);

int rn_poll_cq(void *poll);
int rn_arm_cq(void *arm);
int rn_cq_event(void *cq);
int rn_post_send(void *post);
int rn_post_recv(void *post);

int rn_create_channel(struct rn_event_channel **ch);
int rn_cm_event(struct rn_event_channel *ch, struct rn_event_info *info);
int rn_create_id(struct rn_event_channel *ch, uintptr_t handle, int ps, struct rn_cm_id **id);
void rn_set_handle(struct rn_cm_id *id, uintptr_t handle);
int rn_destroy_id(struct rn_cm_id *id);
int rn_bind_addr(struct rn_cm_id *id, void *addr);
int rn_resolve_addr(struct rn_cm_id *id, void *src, void *dst, int timeout_ms);
int rn_resolve_route(struct rn_cm_id *id, int timeout_ms);
int rn_listen(struct rn_cm_id *id, int backlog);
int rn_connect(struct rn_cm_id *id, const struct rn_conn_param *p, const void *priv, int len);
int rn_accept(struct rn_cm_id *id, const struct rn_conn_param *p, const void *priv, int len);
int rn_reject(struct rn_cm_id *id, const void *priv, int len);
int rn_disconnect(struct rn_cm_id *id);
int rn_established(struct rn_cm_id *id);
int rn_set_option(struct rn_cm_id *id, int option, int value);
int rn_path_mtu(struct rn_cm_id *id);
int rn_set_path(struct rn_cm_id *id, const struct rn_path_rec *rec, int mtu);

int rn_create_ah(void *pd, struct rn_ah_attr *attr, void **ah);
int rn_create_ah_from_wc(void *pd, struct rn_wc *wc, void *grh, int port, void **ah);
int rn_destroy_ah(void *ah);

int rn_join_multicast(struct rn_cm_id *id, void *addr, int flags, uintptr_t group);
int rn_leave_multicast(struct rn_cm_id *id, void *addr);
int rn_attach_mcast(struct rn_qp *qp, const uint8_t gid[16], uint16_t lid);
int rn_detach_mcast(struct rn_qp *qp, const uint8_t gid[16], uint16_t lid);

#endif
