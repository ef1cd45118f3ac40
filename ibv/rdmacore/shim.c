//go:build linux && cgo

#define _GNU_SOURCE /* for dladdr */

#include "shim.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The functions used, by library: return type, name, arguments. */
#define VERBS(F) \
	F(int, ibv_query_device, (struct rn_context *, struct rn_device_attr *)) \
	F(int, ibv_query_port, (struct rn_context *, uint8_t, struct rn_port_attr *)) \
	F(int, ibv_query_gid, (struct rn_context *, uint8_t, int, void *)) \
	F(int, ibv_get_async_event, (struct rn_context *, struct rn_async_event *)) \
	F(void, ibv_ack_async_event, (struct rn_async_event *)) \
	F(void *, ibv_alloc_pd, (struct rn_context *)) \
	F(int, ibv_dealloc_pd, (void *)) \
	F(struct rn_mr *, ibv_reg_mr, (void *, void *, size_t, int)) \
	F(int, ibv_dereg_mr, (struct rn_mr *)) \
	F(struct rn_comp_channel *, ibv_create_comp_channel, (struct rn_context *)) \
	F(int, ibv_destroy_comp_channel, (struct rn_comp_channel *)) \
	F(struct rn_cq *, ibv_create_cq, (struct rn_context *, int, void *, struct rn_comp_channel *, int)) \
	F(int, ibv_destroy_cq, (struct rn_cq *)) \
	F(int, ibv_get_cq_event, (struct rn_comp_channel *, struct rn_cq **, void **)) \
	F(void, ibv_ack_cq_events, (struct rn_cq *, unsigned int)) \
	F(struct rn_qp *, ibv_create_qp, (void *, struct rn_qp_init_attr *)) \
	F(int, ibv_destroy_qp, (struct rn_qp *)) \
	F(int, ibv_query_qp, (struct rn_qp *, struct rn_qp_attr *, int, struct rn_qp_init_attr *)) \
	F(int, ibv_modify_qp, (struct rn_qp *, struct rn_qp_attr *, int)) \
	F(void *, ibv_create_ah, (void *, struct rn_ah_attr *)) \
	F(void *, ibv_create_ah_from_wc, (void *, struct rn_wc *, void *, uint8_t)) \
	F(int, ibv_destroy_ah, (void *)) \
	F(int, ibv_attach_mcast, (struct rn_qp *, const void *, uint16_t)) \
	F(int, ibv_detach_mcast, (struct rn_qp *, const void *, uint16_t))

#define CM(F) \
	F(struct rn_context **, rdma_get_devices, (int *)) \
	F(void, rdma_free_devices, (struct rn_context **)) \
	F(struct rn_event_channel *, rdma_create_event_channel, (void)) \
	F(int, rdma_get_cm_event, (struct rn_event_channel *, struct rn_cm_event **)) \
	F(int, rdma_ack_cm_event, (struct rn_cm_event *)) \
	F(int, rdma_create_id, (struct rn_event_channel *, struct rn_cm_id **, void *, int)) \
	F(int, rdma_destroy_id, (struct rn_cm_id *)) \
	F(int, rdma_bind_addr, (struct rn_cm_id *, void *)) \
	F(int, rdma_resolve_addr, (struct rn_cm_id *, void *, void *, int)) \
	F(int, rdma_resolve_route, (struct rn_cm_id *, int)) \
	F(int, rdma_create_qp, (struct rn_cm_id *, void *, struct rn_qp_init_attr *)) \
	F(int, rdma_connect, (struct rn_cm_id *, struct rn_conn_param *)) \
	F(int, rdma_listen, (struct rn_cm_id *, int)) \
	F(int, rdma_accept, (struct rn_cm_id *, struct rn_conn_param *)) \
	F(int, rdma_reject, (struct rn_cm_id *, const void *, uint8_t)) \
	F(int, rdma_notify, (struct rn_cm_id *, int)) \
	F(int, rdma_disconnect, (struct rn_cm_id *)) \
	F(int, rdma_set_option, (struct rn_cm_id *, int, int, void *, size_t)) \
	F(int, rdma_join_multicast_ex, (struct rn_cm_id *, struct rn_join_mc_attr *, void *)) \
	F(int, rdma_leave_multicast, (struct rn_cm_id *, void *))

#define POINTER(ret, name, args) static ret (*name) args;
VERBS(POINTER)
CM(POINTER)

enum { EVENT_CONNECT_REQUEST = 4, EVENT_QP_COMM_EST = 4, EVENT_MULTICAST_JOIN = 12, EVENT_MULTICAST_ERROR = 13 };
enum { JOIN_ADDRESS = 1 << 0, JOIN_FLAGS = 1 << 1 };
enum { PS_UDP = 0x0111 };
enum { QP_TYPE_UD = 4 };
enum {
	ATTR_STATE = 1 << 0,
	ATTR_PATH_MTU = 1 << 8,
	ATTR_MIN_RNR_TIMER = 1 << 15,
	ATTR_MAX_DEST_RD_ATOMIC = 1 << 17,
};
enum { STATE_RTR = 2, STATE_ERR = 6 };

static int lookup(void *lib, const char *libname, const char *name, void **to, char *problem, size_t len)
{
	void *found = dlsym(lib, name);
	if (found) {
		*to = found;
		return 0;
	}
	snprintf(problem, len, "%s has no function %s", libname, name);
	return -ENOSYS;
}

/* rn_load opens the libraries; they stay open. problem says what went wrong. */
int rn_load(const char *verbs, const char *cm, char *problem, size_t len)
{
	void *lib = dlopen(verbs, RTLD_NOW | RTLD_GLOBAL);
	if (!lib) {
		snprintf(problem, len, "%s", dlerror());
		return -ENOENT;
	}
#define FIND(ret, name, args) \
	if (lookup(lib, libname, #name, (void **)&name, problem, len)) \
		return -ENOSYS;
	const char *libname = verbs;
	VERBS(FIND)
	lib = dlopen(cm, RTLD_NOW | RTLD_GLOBAL);
	if (!lib) {
		snprintf(problem, len, "%s", dlerror());
		return -ENOENT;
	}
	libname = cm;
	CM(FIND)
	return 0;
}

/* result turns "-1 and errno" into -errno. */
static int result(int rc)
{
	return rc ? (errno ? -errno : -EIO) : 0;
}

/* code does so for functions that return the error; some drivers return it with
   the sign turned, or -1 and errno. */
static int code(int rc)
{
	return rc > 0 ? -rc : rc < -1 ? rc : result(rc);
}

/* pointer does so for functions that return NULL. */
static int pointer(const void *p)
{
	return p ? 0 : (errno ? -errno : -EIO);
}

int rn_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return result(flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -1 : 0);
}

/* Devices */

int rn_devices(struct rn_context ***list, int *n)
{
	errno = 0;
	*n = 0;
	*list = rdma_get_devices(n);
	return pointer(*list);
}

void rn_free_devices(struct rn_context **list)
{
	rdma_free_devices(list);
}

int rn_query_device(struct rn_context *c, struct rn_device_attr *attr)
{
	errno = 0;
	return code(ibv_query_device(c, attr));
}

int rn_query_port(struct rn_context *c, int port, struct rn_port_attr *attr)
{
	errno = 0;
	memset(attr, 0, sizeof *attr);
	return code(ibv_query_port(c, port, attr));
}

int rn_query_gid(struct rn_context *c, int port, int index, uint8_t gid[16])
{
	errno = 0;
	return code(ibv_query_gid(c, port, index, gid));
}

/* rn_probe_inline finds how much inline data a queue pair can have: no attribute
   tells, one has to try. It is negative when there can be no such queue pair. */
int rn_probe_inline(struct rn_context *c, int qp_type)
{
	static const int sizes[] = { 1024, 512, 400, 256, 220, 128, 96, 64, 32, 16, 0 };
	int best = -1;
	void *pd = ibv_alloc_pd(c);
	if (!pd)
		return best;
	struct rn_cq *cq = ibv_create_cq(c, 2, NULL, NULL, 0);
	if (cq) {
		for (size_t i = 0; i < sizeof sizes / sizeof *sizes && best < 0; i++) {
			struct rn_qp_init_attr init = {
				.send_cq = cq,
				.recv_cq = cq,
				.cap = { 1, 1, 1, 1, sizes[i] },
				.qp_type = qp_type,
			};
			struct rn_qp *qp = ibv_create_qp(pd, &init);
			if (qp) {
				best = init.cap.max_inline_data;
				ibv_destroy_qp(qp);
			}
		}
		ibv_destroy_cq(cq);
	}
	ibv_dealloc_pd(pd);
	return best;
}

/* rn_occupy creates a completion queue that stays, for the room that it takes. */
int rn_occupy(struct rn_context *c, int depth)
{
	errno = 0;
	return pointer(ibv_create_cq(c, depth, NULL, NULL, 0));
}

int rn_async_event(struct rn_context *c, struct rn_async_info *info)
{
	struct rn_async_event e;
	errno = 0;
	int rc = result(ibv_get_async_event(c, &e));
	if (rc)
		return rc;
	memset(info, 0, sizeof *info);
	info->event = e.event_type;
	switch (e.event_type) {
	case 0: /* CQ error */
		info->handle = (uintptr_t)e.element.cq->cq_context;
		break;
	case 1: case 2: case 3: case 4: case 5: case 6: case 7: case 16: /* of a queue pair */
		info->handle = (uintptr_t)e.element.qp->qp_context;
		break;
	case 9: case 10: case 11: case 12: case 13: case 17: case 18: /* of a port */
		info->port = e.element.port_num;
		break;
	}
	ibv_ack_async_event(&e);
	return 0;
}

/* Memory */

int rn_alloc_pd(struct rn_context *c, void **pd)
{
	errno = 0;
	*pd = ibv_alloc_pd(c);
	return pointer(*pd);
}

int rn_dealloc_pd(void *pd)
{
	errno = 0;
	return code(ibv_dealloc_pd(pd));
}

int rn_reg_mr(void *pd, uintptr_t addr, size_t len, int access, struct rn_mr **mr)
{
	errno = 0;
	*mr = ibv_reg_mr(pd, (void *)addr, len, access);
	return pointer(*mr);
}

int rn_dereg_mr(struct rn_mr *mr)
{
	errno = 0;
	return code(ibv_dereg_mr(mr));
}

/* Completion queues, each with a channel of its own */

int rn_create_cq(struct rn_context *c, int depth, int vector, uintptr_t handle, struct rn_cq **cq)
{
	errno = 0;
	struct rn_comp_channel *ch = ibv_create_comp_channel(c);
	int rc = pointer(ch);
	if (rc)
		return rc;
	rc = rn_nonblocking(ch->fd);
	if (!rc) {
		*cq = ibv_create_cq(c, depth, (void *)handle, ch, vector);
		rc = pointer(*cq);
	}
	if (rc)
		ibv_destroy_comp_channel(ch);
	return rc;
}

/* rn_destroy_cq acknowledges the events that were taken, without which the
   library would wait for ever. fd_closed says that the channel's descriptor is
   closed already: the library must not close a number that may be another's. */
int rn_destroy_cq(struct rn_cq *cq, unsigned int events, int fd_closed)
{
	struct rn_comp_channel *ch = cq->channel;
	if (events)
		ibv_ack_cq_events(cq, events);
	errno = 0;
	int rc = code(ibv_destroy_cq(cq));
	if (rc)
		return rc;
	if (fd_closed)
		ch->fd = -1;
	ibv_destroy_comp_channel(ch);
	return 0;
}

const char *rn_driver(struct rn_context *c)
{
	Dl_info info;

	if (!dladdr((void *)c->ops.poll_cq, &info) || !info.dli_fname)
		return "";
	return info.dli_fname;
}

int rn_poll_cq(void *poll)
{
	struct rn_poll *p = poll;
	return p->cq->context->ops.poll_cq(p->cq, p->n, p->wcs);
}

int rn_arm_cq(void *arm)
{
	struct rn_arm *a = arm;
	errno = 0;
	return code(a->cq->context->ops.req_notify_cq(a->cq, a->solicited));
}

/* rn_cq_event takes an event if there is one, else -EAGAIN. */
int rn_cq_event(void *queue)
{
	struct rn_cq *cq = queue;
	void *context;
	errno = 0;
	return result(ibv_get_cq_event(cq->channel, &cq, &context));
}

void rn_ack_cq(struct rn_cq *cq, unsigned int events)
{
	ibv_ack_cq_events(cq, events);
}

/* Queue pairs */

int rn_create_qp(struct rn_cm_id *id, void *pd, uintptr_t handle, struct rn_cq *send_cq,
		 struct rn_cq *recv_cq, int qp_type, int signal_all, struct rn_qp_cap *cap)
{
	struct rn_qp_init_attr init = {
		.qp_context = (void *)handle,
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.cap = *cap,
		.qp_type = qp_type,
		.sq_sig_all = signal_all,
	};
	errno = 0;
	int rc = code(rdma_create_qp(id, pd, &init));
	*cap = init.cap;
	return rc;
}

/* rn_destroy_qp destroys a queue pair that its id does not name any more:
   rdma_destroy_qp would leave the name in place meanwhile, and while
   rdma_get_cm_event uses it. */
void rn_destroy_qp(struct rn_qp *qp)
{
	ibv_destroy_qp(qp);
}

int rn_qp_state(struct rn_qp *qp)
{
	struct rn_qp_attr attr;
	struct rn_qp_init_attr init;
	errno = 0;
	int rc = code(ibv_query_qp(qp, &attr, ATTR_STATE, &init));
	return rc ? rc : (int)attr.qp_state;
}

/* siw calls the depth of its queue of outgoing Reads max_dest_rd_atomic. */
int rn_siw_reads(struct rn_qp *qp)
{
	struct rn_qp_attr attr;
	struct rn_qp_init_attr init;
	errno = 0;
	int rc = code(ibv_query_qp(qp, &attr, ATTR_MAX_DEST_RD_ATOMIC, &init));
	return rc ? rc : (int)attr.max_dest_rd_atomic;
}

int rn_qp_error(struct rn_qp *qp)
{
	struct rn_qp_attr attr = { .qp_state = STATE_ERR };
	errno = 0;
	return code(ibv_modify_qp(qp, &attr, ATTR_STATE));
}

int rn_qp_rnr_timer(struct rn_qp *qp, int timer)
{
	struct rn_qp_attr attr = { .min_rnr_timer = timer };
	errno = 0;
	return code(ibv_modify_qp(qp, &attr, ATTR_MIN_RNR_TIMER));
}

/* rn_qp_path_mtu returns a number of enum ibv_mtu, 0 before it is known. */
int rn_qp_path_mtu(struct rn_qp *qp)
{
	struct rn_qp_attr attr;
	struct rn_qp_init_attr init;
	errno = 0;
	int rc = code(ibv_query_qp(qp, &attr, ATTR_STATE | ATTR_PATH_MTU, &init));
	if (rc)
		return rc;
	return attr.qp_state < STATE_RTR || attr.qp_state == STATE_ERR ? 0 : attr.path_mtu;
}

/* How many work requests go to the device in one list. */
enum { LIST = 32 };

/*
 * elements is the list of a work request. Libraries look at the first element of a request that has none: irdma's
 * puts it into RDMA Reads, Writes and receives, erdma's reads it for RDMA Reads, cxgb4's compares its length. So a
 * request without elements gets an empty one to look at, neither NULL nor what another request has.
 */
static struct rn_sge *elements(const struct rn_sge *sge, uint32_t n, struct rn_sge *none)
{
	return n ? (struct rn_sge *)sge : none;
}

int rn_post_send(void *post)
{
	struct rn_post *p = post;
	struct rn_qp *qp = p->qp;
	const struct rn_wr *wr = p->wrs;
	const struct rn_sge *sge = p->sges;
	struct rn_sge none = { 0 };
	struct rn_send_wr list[LIST], *bad;
	p->posted = 0;
	while (p->posted < p->n) {
		int k = p->n - p->posted < LIST ? p->n - p->posted : LIST;
		for (int i = 0; i < k; i++, wr++) {
			struct rn_send_wr *w = &list[i];
			w->wr_id = wr->id;
			w->next = i + 1 < k ? w + 1 : NULL;
			w->sg_list = elements(sge, wr->num_sge, &none);
			w->num_sge = wr->num_sge;
			w->opcode = wr->opcode;
			w->send_flags = wr->flags;
			w->imm_or_key = wr->imm_or_key;
			if (qp->qp_type == QP_TYPE_UD) {
				w->wr.ud.ah = (void *)(uintptr_t)wr->remote_addr;
				w->wr.ud.remote_qpn = wr->rkey;
				w->wr.ud.remote_qkey = wr->qkey;
			} else if (wr->opcode == 5 || wr->opcode == 6) { /* atomics */
				w->wr.atomic.remote_addr = wr->remote_addr;
				w->wr.atomic.compare_add = wr->compare_add;
				w->wr.atomic.swap = wr->swap;
				w->wr.atomic.rkey = wr->rkey;
			} else {
				w->wr.rdma.remote_addr = wr->remote_addr;
				w->wr.rdma.rkey = wr->rkey;
			}
			sge += wr->num_sge;
		}
		bad = NULL;
		errno = 0;
		int rc = code(qp->context->ops.post_send(qp, list, &bad));
		if (bad) {
			/* siw forgets the error when it met a full queue */
			p->posted += bad - list;
			return rc ? rc : -ENOMEM;
		}
		/* Where siw cannot ring the doorbell all is in the queue, and the
		   connection has ended. */
		p->posted += k;
	}
	return 0;
}

int rn_post_recv(void *post)
{
	struct rn_post *p = post;
	struct rn_qp *qp = p->qp;
	const struct rn_wr *wr = p->wrs;
	const struct rn_sge *sge = p->sges;
	struct rn_sge none = { 0 };
	struct rn_recv_wr list[LIST], *bad;
	p->posted = 0;
	while (p->posted < p->n) {
		int k = p->n - p->posted < LIST ? p->n - p->posted : LIST;
		for (int i = 0; i < k; i++, wr++) {
			struct rn_recv_wr *w = &list[i];
			w->wr_id = wr->id;
			w->next = i + 1 < k ? w + 1 : NULL;
			w->sg_list = elements(sge, wr->num_sge, &none);
			w->num_sge = wr->num_sge;
			sge += wr->num_sge;
		}
		bad = NULL;
		errno = 0;
		int rc = code(qp->context->ops.post_recv(qp, list, &bad));
		if (rc) {
			p->posted += bad ? bad - list : 0;
			return rc;
		}
		p->posted += k;
	}
	return 0;
}

/* Connection management */

int rn_create_channel(struct rn_event_channel **ch)
{
	errno = 0;
	*ch = rdma_create_event_channel();
	int rc = pointer(*ch);
	return rc ? rc : rn_nonblocking((*ch)->fd);
}

/* rn_cm_event takes an event if there is one, else -EAGAIN, and gives it back to
   the library at once, so that no rdma_destroy_id has to wait for us. */
int rn_cm_event(struct rn_event_channel *ch, struct rn_event_info *info)
{
	struct rn_cm_event *e;
	errno = 0;
	int rc = result(rdma_get_cm_event(ch, &e));
	if (rc)
		return rc;
	memset(info, 0, offsetof(struct rn_event_info, private_data));
	info->id = e->id;
	info->handle = (uintptr_t)e->id->context;
	info->event = e->event;
	/* the library's own failures are -1, and errno */
	info->status = e->status == -1 && errno ? -errno : e->status;
	if (e->event == EVENT_CONNECT_REQUEST) {
		info->listen_handle = (uintptr_t)e->listen_id->context;
		e->id->context = NULL; /* until it has a handle of its own */
	}
	if (e->id->ps == PS_UDP) {
		info->qp_num = e->param.ud.qp_num;
		info->qkey = e->param.ud.qkey;
		info->ah_attr = e->param.ud.ah_attr;
	} else {
		info->responder_resources = e->param.conn.responder_resources;
		info->initiator_depth = e->param.conn.initiator_depth;
	}
	/* In the same place for both. Of multicast it is the pointer that rdma_join_multicast was given. */
	if (e->event == EVENT_MULTICAST_JOIN || e->event == EVENT_MULTICAST_ERROR) {
		info->group = (uintptr_t)e->param.ud.private_data;
	} else if (e->param.conn.private_data) {
		info->private_len = e->param.conn.private_data_len;
		memcpy(info->private_data, e->param.conn.private_data, info->private_len);
	}
	rdma_ack_cm_event(e);
	return 0;
}

int rn_create_id(struct rn_event_channel *ch, uintptr_t handle, int ps, struct rn_cm_id **id)
{
	errno = 0;
	return result(rdma_create_id(ch, id, (void *)handle, ps));
}

void rn_set_handle(struct rn_cm_id *id, uintptr_t handle)
{
	id->context = (void *)handle;
}

int rn_destroy_id(struct rn_cm_id *id)
{
	errno = 0;
	return result(rdma_destroy_id(id));
}

int rn_bind_addr(struct rn_cm_id *id, void *addr)
{
	errno = 0;
	return result(rdma_bind_addr(id, addr));
}

int rn_resolve_addr(struct rn_cm_id *id, void *src, void *dst, int timeout_ms)
{
	errno = 0;
	return result(rdma_resolve_addr(id, src, dst, timeout_ms));
}

int rn_resolve_route(struct rn_cm_id *id, int timeout_ms)
{
	errno = 0;
	return result(rdma_resolve_route(id, timeout_ms));
}

int rn_listen(struct rn_cm_id *id, int backlog)
{
	errno = 0;
	return result(rdma_listen(id, backlog));
}

int rn_connect(struct rn_cm_id *id, const struct rn_conn_param *p, const void *priv, int len)
{
	struct rn_conn_param param = *p;
	param.private_data = priv;
	param.private_data_len = len;
	errno = 0;
	return result(rdma_connect(id, &param));
}

int rn_accept(struct rn_cm_id *id, const struct rn_conn_param *p, const void *priv, int len)
{
	struct rn_conn_param param = *p;
	param.private_data = priv;
	param.private_data_len = len;
	errno = 0;
	return result(rdma_accept(id, &param));
}

int rn_reject(struct rn_cm_id *id, const void *priv, int len)
{
	errno = 0;
	return result(rdma_reject(id, priv, len));
}

int rn_disconnect(struct rn_cm_id *id)
{
	errno = 0;
	return result(rdma_disconnect(id));
}

/* rn_established passes on that a message has come before the last word of the
   set-up, which is as good. */
int rn_established(struct rn_cm_id *id)
{
	errno = 0;
	return result(rdma_notify(id, EVENT_QP_COMM_EST));
}

int rn_set_option(struct rn_cm_id *id, int option, int value)
{
	uint8_t byte = value;
	errno = 0;
	if (option == 1 || option == 2) /* REUSEADDR, AFONLY */
		return result(rdma_set_option(id, 0, option, &value, sizeof value));
	return result(rdma_set_option(id, 0, option, &byte, sizeof byte));
}

/* rn_path_mtu returns a number of enum ibv_mtu, 0 before the route is known. */
int rn_path_mtu(struct rn_cm_id *id)
{
	return id->num_paths > 0 && id->path_rec ? id->path_rec->mtu : 0;
}

enum { OPTION_LEVEL_IB = 1, OPTION_IB_PATH = 1 };
enum { PATH_GMP = 1 << 0, PATH_PRIMARY = 1 << 1, PATH_OUTBOUND = 1 << 3, PATH_INBOUND_REVERSE = 1 << 5 };
enum { SELECT_EQUAL = 2 << 6 };

/* rn_set_path takes the place of rdma_resolve_route: the route is rec, which that
   has found before, with another MTU. */
int rn_set_path(struct rn_cm_id *id, const struct rn_path_rec *rec, int mtu)
{
	struct rn_path_data d = { .flags = PATH_GMP | PATH_PRIMARY | PATH_OUTBOUND | PATH_INBOUND_REVERSE };
	memcpy(d.path.dgid, rec->dgid, sizeof d.path.dgid);
	memcpy(d.path.sgid, rec->sgid, sizeof d.path.sgid);
	d.path.dlid = rec->dlid;
	d.path.slid = rec->slid;
	d.path.flowlabel_hoplimit = htonl(ntohl(rec->flow_label) << 8 | rec->hop_limit);
	d.path.tclass = rec->traffic_class;
	d.path.reversible_numpath = (rec->reversible ? 0x80 : 0) | (rec->numb_path & 0x7f);
	d.path.pkey = rec->pkey;
	d.path.qosclass_sl = htons(rec->sl & 0xf);
	d.path.mtu = SELECT_EQUAL | mtu;
	d.path.rate = rec->rate_selector << 6 | (rec->rate & 0x3f);
	d.path.packetlifetime = rec->packet_life_time_selector << 6 | (rec->packet_life_time & 0x3f);
	d.path.preference = rec->preference;
	errno = 0;
	return result(rdma_set_option(id, OPTION_LEVEL_IB, OPTION_IB_PATH, &d, sizeof d));
}

/* Address handles */

int rn_create_ah(void *pd, struct rn_ah_attr *attr, void **ah)
{
	errno = 0;
	*ah = ibv_create_ah(pd, attr);
	return pointer(*ah);
}

int rn_create_ah_from_wc(void *pd, struct rn_wc *wc, void *grh, int port, void **ah)
{
	errno = 0;
	*ah = ibv_create_ah_from_wc(pd, wc, grh, port);
	return pointer(*ah);
}

int rn_destroy_ah(void *ah)
{
	errno = 0;
	return code(ibv_destroy_ah(ah));
}

/* Multicast */

int rn_join_multicast(struct rn_cm_id *id, void *addr, int flags, uintptr_t group)
{
	struct rn_join_mc_attr attr = { .comp_mask = JOIN_ADDRESS | JOIN_FLAGS, .join_flags = flags, .addr = addr };
	errno = 0;
	return result(rdma_join_multicast_ex(id, &attr, (void *)group));
}

int rn_leave_multicast(struct rn_cm_id *id, void *addr)
{
	errno = 0;
	return result(rdma_leave_multicast(id, addr));
}

int rn_attach_mcast(struct rn_qp *qp, const uint8_t gid[16], uint16_t lid)
{
	errno = 0;
	return code(ibv_attach_mcast(qp, gid, lid));
}

int rn_detach_mcast(struct rn_qp *qp, const uint8_t gid[16], uint16_t lid)
{
	errno = 0;
	return code(ibv_detach_mcast(qp, gid, lid));
}
