/*
 * Stands in for libibverbs and librdmacm, with devices that differ from those of the guests. FAKE_DEVICES names
 * them, each with how it differs behind a colon:
 *
 *   query        ibv_query_device fails
 *   port         ibv_query_port fails
 *   once         ibv_query_port fails the first time
 *   first        work requests are read as irdma and erdma do: the first element, whatever num_sge is
 *   unsolicited  armed for solicited events only it refuses as mana does, and ends the process if asked again
 *   hasty        its peers send once, and disconnect before it is known here that they are connected; receives
 *                wait for what is sent, or are flushed
 *   gone         its peers disconnect before they are answered
 *
 * Connections are made with nobody, who connects once to whoever listens. What is posted there completes at once, but
 * where it says otherwise above.
 */
#include "../shim.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { MAX = 8, DEPTH = 64 };

static struct rn_device devices[MAX];
static struct rn_context contexts[MAX];
static const char *quirks[MAX];
static int queried[MAX];
static int n_devices;

struct queue {
	struct rn_cq cq;
	struct rn_wc wcs[DEPTH];
	int n, armed;
};

static int is(struct rn_context *c, const char *quirk)
{
	return !strcmp(quirks[c - contexts], quirk);
}

static void signal_fd(int fd)
{
	uint64_t one = 1;
	if (write(fd, &one, sizeof one) < 0)
		abort();
}

/* The completion queues, and the receives that wait, are the threads' of the connection manager as well. */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

/* complete is called with mu held. */
static void complete(struct rn_cq *cq, struct rn_wc wc)
{
	struct queue *q = (struct queue *)cq;
	if (q->n == DEPTH)
		abort();
	q->wcs[q->n++] = wc;
	if (q->armed) {
		q->armed = 0;
		signal_fd(cq->channel->fd);
	}
}

static int poll_cq(struct rn_cq *cq, int n, struct rn_wc *wcs)
{
	struct queue *q = (struct queue *)cq;
	pthread_mutex_lock(&mu);
	n = n < q->n ? n : q->n;
	memcpy(wcs, q->wcs, n * sizeof *wcs);
	memmove(q->wcs, q->wcs + n, (q->n - n) * sizeof *wcs);
	q->n -= n;
	pthread_mutex_unlock(&mu);
	return n;
}

/* Receives of a hasty device, oldest first. */
struct pair {
	struct rn_qp qp;
	uint64_t recvs[DEPTH];
	int n;
};

/* end_recvs ends up to n receives that wait: status 0 is success, 5 is flushed. */
static void end_recvs(struct rn_qp *qp, int n, int status)
{
	struct pair *p = (struct pair *)qp;
	if (!is(qp->context, "hasty"))
		return;
	pthread_mutex_lock(&mu);
	n = n < p->n ? n : p->n;
	for (int i = 0; i < n; i++)
		complete(qp->recv_cq, (struct rn_wc){ .wr_id = p->recvs[i], .qp_num = qp->qp_num, .status = status, .opcode = 128 });
	memmove(p->recvs, p->recvs + n, (p->n - n) * sizeof *p->recvs);
	p->n -= n;
	pthread_mutex_unlock(&mu);
}

static int req_notify_cq(struct rn_cq *cq, int solicited)
{
	static int refused;
	if (solicited && is(cq->context, "unsolicited")) {
		if (refused++)
			abort();
		return -EOPNOTSUPP;
	}
	((struct queue *)cq)->armed = 1;
	return 0;
}

/* first says what such a device makes of an element that it takes for granted: 4 is a local protection error. */
static int first(struct rn_qp *qp, int num_sge, const struct rn_sge *sge)
{
	if (!is(qp->context, "first"))
		return 0;
	const volatile struct rn_sge *e = sge;
	return num_sge == 0 && (e->addr || e->length || e->lkey) ? 4 : 0;
}

static int post_send(struct rn_qp *qp, struct rn_send_wr *wr, struct rn_send_wr **bad)
{
	(void)bad;
	pthread_mutex_lock(&mu);
	for (; wr; wr = wr->next)
		complete(qp->send_cq, (struct rn_wc){ .wr_id = wr->wr_id, .qp_num = qp->qp_num,
			.status = first(qp, wr->num_sge, wr->sg_list), .opcode = wr->opcode == 4 ? 2 : 0 });
	pthread_mutex_unlock(&mu);
	return 0;
}

static int post_recv(struct rn_qp *qp, struct rn_recv_wr *wr, struct rn_recv_wr **bad)
{
	struct pair *p = (struct pair *)qp;
	(void)bad;
	pthread_mutex_lock(&mu);
	for (; wr; wr = wr->next) {
		if (is(qp->context, "hasty")) {
			if (p->n == DEPTH)
				abort();
			p->recvs[p->n++] = wr->wr_id;
			continue;
		}
		complete(qp->recv_cq, (struct rn_wc){ .wr_id = wr->wr_id, .qp_num = qp->qp_num,
			.status = first(qp, wr->num_sge, wr->sg_list), .opcode = 128 });
	}
	pthread_mutex_unlock(&mu);
	return 0;
}

__attribute__((constructor)) static void find(void)
{
	char *names = strdup(getenv("FAKE_DEVICES"));
	for (char *name = strtok(names, ","); name && n_devices < MAX; name = strtok(NULL, ",")) {
		struct rn_context *c = &contexts[n_devices];
		char *quirk = strchr(name, ':');
		if (quirk)
			*quirk++ = 0;
		quirks[n_devices] = quirk ? quirk : "";
		c->device = &devices[n_devices++];
		snprintf(c->device->name, sizeof c->device->name, "%s", name);
		c->async_fd = eventfd(0, EFD_NONBLOCK);
		c->ops.poll_cq = poll_cq;
		c->ops.req_notify_cq = req_notify_cq;
		c->ops.post_send = post_send;
		c->ops.post_recv = post_recv;
	}
}

struct rn_context **rdma_get_devices(int *n)
{
	struct rn_context **list = calloc(n_devices + 1, sizeof *list);
	for (int i = 0; i < n_devices; i++)
		list[i] = &contexts[i];
	*n = n_devices;
	return list;
}

void rdma_free_devices(struct rn_context **list)
{
	free(list);
}

int ibv_query_device(struct rn_context *c, struct rn_device_attr *a)
{
	memset(a, 0, sizeof *a);
	a->phys_port_cnt = 1;
	a->max_qp = a->max_cq = a->max_mr = a->max_pd = 100;
	a->max_qp_wr = a->max_cqe = DEPTH;
	a->max_sge = a->max_sge_rd = a->max_qp_rd_atom = a->max_qp_init_rd_atom = 4;
	return is(c, "query") ? EIO : 0;
}

int ibv_query_port(struct rn_context *c, uint8_t port, struct rn_port_attr *a)
{
	(void)port;
	a->state = 4;
	a->link_layer = 2;
	a->active_mtu = 5;
	a->max_msg_sz = 1 << 30;
	return is(c, "port") || (is(c, "once") && !queried[c - contexts]++) ? EIO : 0;
}

int ibv_query_gid(struct rn_context *c, uint8_t port, int index, void *gid)
{
	(void)c, (void)port, (void)index, (void)gid;
	return -1;
}

void *ibv_alloc_pd(struct rn_context *c)
{
	return c;
}

int ibv_dealloc_pd(void *pd)
{
	(void)pd;
	return 0;
}

struct rn_comp_channel *ibv_create_comp_channel(struct rn_context *c)
{
	struct rn_comp_channel *ch = calloc(1, sizeof *ch);
	ch->context = c;
	ch->fd = eventfd(0, EFD_NONBLOCK);
	return ch;
}

int ibv_destroy_comp_channel(struct rn_comp_channel *ch)
{
	free(ch);
	return 0;
}

struct rn_cq *ibv_create_cq(struct rn_context *c, int cqe, void *context, struct rn_comp_channel *ch, int vector)
{
	(void)vector;
	struct queue *q = calloc(1, sizeof *q);
	q->cq.context = c;
	q->cq.channel = ch;
	q->cq.cq_context = context;
	q->cq.cqe = cqe;
	return &q->cq;
}

int ibv_destroy_cq(struct rn_cq *cq)
{
	free(cq);
	return 0;
}

int ibv_get_cq_event(struct rn_comp_channel *ch, struct rn_cq **cq, void **context)
{
	(void)cq, (void)context;
	uint64_t n;
	return read(ch->fd, &n, sizeof n) < 0 ? -1 : 0;
}

void ibv_ack_cq_events(struct rn_cq *cq, unsigned int n)
{
	(void)cq, (void)n;
}

struct rn_qp *ibv_create_qp(void *pd, struct rn_qp_init_attr *init)
{
	struct rn_qp *qp = calloc(1, sizeof(struct pair));
	qp->context = pd;
	qp->qp_context = init->qp_context;
	qp->send_cq = init->send_cq;
	qp->recv_cq = init->recv_cq;
	qp->qp_type = init->qp_type;
	qp->qp_num = 7;
	return qp;
}

int ibv_destroy_qp(struct rn_qp *qp)
{
	free(qp);
	return 0;
}

int ibv_modify_qp(struct rn_qp *qp, struct rn_qp_attr *attr, int mask)
{
	(void)mask;
	if (attr->qp_state == 6) /* the error state */
		end_recvs(qp, DEPTH, 5);
	return 0;
}

/* The connection manager: each step succeeds with the next event. */

static struct rn_cm_event events[MAX];
static int n_events;
static struct rn_event_channel channel;

static int happens(struct rn_cm_id *id, int event)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	events[n_events].id = id;
	events[n_events].event = event;
	__atomic_store_n(&n_events, n_events + 1, __ATOMIC_SEQ_CST);
	signal_fd(channel.fd);
	return 0;
}

struct rn_event_channel *rdma_create_event_channel(void)
{
	channel.fd = eventfd(0, EFD_NONBLOCK);
	return &channel;
}

int rdma_get_cm_event(struct rn_event_channel *ch, struct rn_cm_event **e)
{
	static int taken;
	uint64_t n;
	if (taken == __atomic_load_n(&n_events, __ATOMIC_SEQ_CST)) {
		if (read(ch->fd, &n, sizeof n) >= 0)
			errno = EAGAIN;
		if (taken == __atomic_load_n(&n_events, __ATOMIC_SEQ_CST))
			return -1;
	}
	*e = &events[taken++];
	return 0;
}

int rdma_ack_cm_event(struct rn_cm_event *e)
{
	(void)e;
	return 0;
}

int rdma_create_id(struct rn_event_channel *ch, struct rn_cm_id **id, void *context, int ps)
{
	*id = calloc(1, sizeof **id);
	(*id)->channel = ch;
	(*id)->context = context;
	(*id)->ps = ps;
	return 0;
}

int rdma_resolve_addr(struct rn_cm_id *id, void *src, void *dst, int timeout)
{
	(void)src, (void)dst, (void)timeout;
	id->verbs = &contexts[0];
	id->port_num = 1;
	return happens(id, 0);
}

int rdma_resolve_route(struct rn_cm_id *id, int timeout)
{
	(void)timeout;
	return happens(id, 2);
}

int rdma_create_qp(struct rn_cm_id *id, void *pd, struct rn_qp_init_attr *init)
{
	id->qp = ibv_create_qp(pd, init);
	return 0;
}

int rdma_connect(struct rn_cm_id *id, struct rn_conn_param *param)
{
	(void)param;
	return happens(id, is(id->verbs, "hasty") ? 10 : 9);
}

int rdma_bind_addr(struct rn_cm_id *id, void *addr)
{
	(void)addr;
	id->verbs = &contexts[0];
	id->port_num = 1;
	return 0;
}

int rdma_listen(struct rn_cm_id *id, int backlog)
{
	(void)backlog;
	struct rn_cm_id *peer = calloc(1, sizeof *peer);
	peer->verbs = id->verbs;
	peer->channel = id->channel;
	peer->ps = id->ps;
	peer->port_num = 1;
	events[n_events].listen_id = id;
	happens(peer, 4);
	return is(id->verbs, "gone") ? happens(peer, 10) : 0;
}

int rdma_accept(struct rn_cm_id *id, struct rn_conn_param *param)
{
	(void)param;
	end_recvs(id->qp, 1, 0);
	if (is(id->verbs, "gone"))
		return 0;
	return happens(id, is(id->verbs, "hasty") ? 10 : 9);
}

int rdma_disconnect(struct rn_cm_id *id)
{
	end_recvs(id->qp, DEPTH, 5);
	return 0;
}

int rdma_destroy_id(struct rn_cm_id *id)
{
	free(id);
	return 0;
}

/* What no test needs yet. */
#define FAIL(name) \
	int name(void) \
	{ \
		errno = EAGAIN; \
		return -1; \
	}
FAIL(ibv_get_async_event)
FAIL(ibv_ack_async_event)
FAIL(ibv_reg_mr)
FAIL(ibv_dereg_mr)
FAIL(ibv_query_qp)
FAIL(ibv_create_ah)
FAIL(ibv_create_ah_from_wc)
FAIL(ibv_destroy_ah)
FAIL(ibv_attach_mcast)
FAIL(ibv_detach_mcast)
FAIL(rdma_reject)
FAIL(rdma_notify)
FAIL(rdma_set_option)
FAIL(rdma_join_multicast_ex)
FAIL(rdma_leave_multicast)
