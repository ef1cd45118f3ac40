package udconn

import (
	"context"
	"net/netip"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// rdmaSide is the RDMA devices of a Conn. It is the owner of the queue pairs.
type rdmaSide struct {
	*shared
	qps      queuePairs
	peers    *peerTable
	groups   *groups
	resolver resolver
	out      dispatcher

	responder *responder // responder is nil for a member of a group whose port another Conn serves.
}

// newRDMASide returns a side that is not bound yet.
func newRDMASide(s *shared, recv *receiver, send *sender, g *groups, provider ibv.Provider) *rdmaSide {
	r := &rdmaSide{shared: s, peers: newPeerTable(s), groups: g}
	r.qps.shared, r.qps.provider, r.qps.owner, r.qps.recv, r.qps.send = s, provider, r, recv, send
	r.resolver = resolver{shared: s, qps: &r.qps, peers: r.peers, groups: g, recv: recv, send: send, slots: make(chan struct{}, s.Bounds.Resolvers)}
	r.out = dispatcher{shared: s, res: &r.resolver, send: send}
	return r
}

// listen takes the listener of the address, whose requests are served from begin on.
func (r *rdmaSide) listen(ln ibv.Listener) {
	r.responder = &responder{shared: r.shared, listener: ln, qps: &r.qps, peers: r.peers, recv: r.qps.recv}
}

// open takes a device into use. A specific address takes its device now, others when a peer
// needs it.
func (r *rdmaSide) open(ctx context.Context, local netip.Addr) (err error) {
	if local.IsValid() && !local.IsUnspecified() {
		_, err = r.qps.open(ctx, local)
		return err
	}
	return r.qps.limitOfAll()
}

// begin starts to reply to requests.
func (r *rdmaSide) begin() {
	if r.responder != nil {
		r.wg.Go(r.responder.serve)
	}
}

// connect finds the path to the peer of a connected Conn.
func (r *rdmaSide) connect(ctx context.Context) error {
	r.qps.send.mu.Lock()
	pe := r.resolver.peer(r.remote)
	pe.resolving = true
	r.qps.send.mu.Unlock()
	return r.resolver.resolve(ctx, pe)
}

// tick implements owner.
func (r *rdmaSide) tick() { r.peers.tick() }

// sender implements owner.
func (r *rdmaSide) sender(q *queuePair, host, to netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool) {
	if to.IsMulticast() {
		return r.groupSender(q, host, to, wc)
	}
	if wc.Flags&ibv.WCWithImm != 0 {
		if port, ok := PortOf(wc.Imm); ok {
			return r.peers.sender(host, port, wc.SrcQP), false, true
		}
	}
	from, first, ok := r.peers.plainSender(host, wc.SrcQP)
	if first {
		r.resolver.learn(q, from, wc)
	}
	return from, false, ok
}

// groupSender is sender for a datagram to a group. The Conn must be a member, and its port the
// one that the datagram is for.
func (r *rdmaSide) groupSender(q *queuePair, host, group netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool) {
	src, dst, ok := GroupPorts(wc.Imm)
	if !ok || wc.Flags&ibv.WCWithImm == 0 || dst != r.local.Port() || !q.recv.groups[group] {
		return from, false, false
	}
	own = wc.SrcQP == q.qp.QPN() && q.recv.origins[host.WithZone("")]
	return r.peers.sender(host, src, wc.SrcQP), own, true
}

// failed implements owner. Another queue pair is made when one is needed; it joins the groups
// of this one.
func (r *rdmaSide) failed(q *queuePair, err error) {
	if r.closed.Load() {
		return
	}
	r.wg.Go(func() {
		if r.qps.remove(q, err) {
			r.groups.replace(q)
		}
	})
}

// forget implements owner.
func (r *rdmaSide) forget(q *queuePair) {
	r.peers.dropPaths(func(pe *peer) bool { return pe.path.qp == q })
}

// closeListener ends the replies to requests.
func (r *rdmaSide) closeListener() error {
	if r.responder == nil {
		return nil
	}
	return r.responder.listener.Close()
}

// close releases everything. The Conn is closed and has no goroutines any more. The caller
// holds groups.mu.
func (r *rdmaSide) close() error {
	r.qps.drain(time.Now().Add(r.Linger))
	r.peers.close()
	return r.qps.close()
}

// stats adds what is counted here.
func (r *rdmaSide) stats(s *Stats) { s.Peers, s.Receives = r.peers.count(), r.qps.receives() }
