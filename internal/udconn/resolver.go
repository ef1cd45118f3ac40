package udconn

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// resolver finds the paths to peers. rdma_cm's port space of UDP resolves an address to a
// queue pair by one request and its reply (SIDR, the InfiniBand architecture's service ID
// resolution). Each resolution has a goroutine of its own.
type resolver struct {
	*shared
	qps    *queuePairs
	peers  *peerTable
	groups *groups
	recv   *receiver
	send   *sender
	slots  chan struct{} // slots has room for each resolution that goes on.

	udp *udpSocket // udp is nil if the socket is not open. sender.mu guards it.
}

// peer returns what is known of an address, nil if there is no room for it. An address that
// has sent something by UDP of late is reached by UDP at first. The caller holds sender.mu.
func (r *resolver) peer(addr netip.AddrPort) *peer {
	if pe := r.peers.get(addr); pe != nil {
		return pe
	}
	pe, evicted := r.peers.add(addr)
	if evicted != nil {
		evicted.dropPath()
		r.unsent.Add(uint64(len(evicted.waiting)))
	}
	if pe != nil && r.udp != nil && r.peers.sendsByUDP(addr, r.now()) {
		pe.viaUDP, pe.next = true, r.now()+r.Bounds.UDPPause
	}
	return pe
}

// keep copies a datagram for a peer that is being resolved. The caller holds sender.mu.
func (r *resolver) keep(pe *peer, b []byte) error {
	if len(pe.waiting) >= r.Bounds.Waiting {
		r.unsent.Add(1)
		return nil
	}
	kept := make([]byte, len(b))
	if _, err := fault.Copy(kept, b); err != nil {
		return err
	}
	pe.waiting = append(pe.waiting, kept)
	return nil
}

// start has a peer resolved, once at a time. The caller holds sender.mu.
func (r *resolver) start(pe *peer) {
	if pe.resolving {
		return
	}
	pe.resolving = true
	r.wg.Go(func() {
		select {
		case r.slots <- struct{}{}:
			r.resolve(r.ctx, pe)
			<-r.slots
		case <-r.ctx.Done():
		}
	})
}

// await has the path to a group found, which takes no request, and waits until something may
// have changed. The caller holds sender.mu, but not meanwhile.
func (r *resolver) await(pe *peer) {
	if !pe.resolving {
		pe.resolving = true
		r.wg.Go(func() { r.resolve(r.ctx, pe) })
	}
	r.send.writers.Wait()
}

// resolve finds the path to a peer whose field resolving the caller has set. It returns why
// there is none.
func (r *resolver) resolve(ctx context.Context, pe *peer) error {
	r.resolutions.Add(1)
	w, err := r.lookUp(ctx, pe.addr)
	r.send.mu.Lock()
	defer r.send.mu.Unlock()
	if err == nil && (pe.path == nil || !pe.path.leadsTo(w)) {
		err = w.qp.send.createAH(&w.destination, func(pd ibv.PD) (ibv.AH, error) { return pd.CreateAH(w.to.AH) })
	}
	r.finish(pe, w, err)
	return err
}

// learn takes the path to a peer that is not rdmanet, and replies to no requests, from its
// first datagram since its own request. The caller holds receiver.mu.
func (r *resolver) learn(q *queuePair, addr netip.AddrPort, wc *ibv.WC) {
	r.send.mu.Lock()
	defer r.send.mu.Unlock()
	pe := r.peer(addr)
	if r.closed.Load() || pe == nil || pe.resolving || !r.peers.addPlain(addr, wc.SrcQP) {
		return // The next datagram may have its path taken.
	}
	r.peers.removeRequester(addr.Addr())
	if w := pe.path; w != nil && (!w.learnt || w.qp == q && w.to.QPN == wc.SrcQP) {
		return
	}
	pe.resolving = true
	w := &path{qp: q, destination: destination{to: ibv.UDParam{QPN: wc.SrcQP, QKey: ibv.QKeyUDP}, plain: true}, learnt: true}
	from, header := *wc, slices.Clone(q.recv.slots[wc.ID].Buf[:ibv.GRHLen])
	r.wg.Go(func() {
		r.send.mu.Lock()
		defer r.send.mu.Unlock()
		err := q.send.createAH(&w.destination, func(pd ibv.PD) (ibv.AH, error) { return pd.CreateAHFromWC(q.id.Port(), &from, header) })
		r.finish(pe, w, err)
	})
}

// finish takes the outcome of a resolution: an error, or a path. A path that is the same as
// the peer's has no address handle. The caller holds sender.mu.
func (r *resolver) finish(pe *peer, w *path, err error) {
	now := r.now()
	defer r.send.writers.WakeAll() // Some may wait for the path to a group.
	pe.resolving, pe.resolved = false, now
	pe.maybeMoved.Store(false)
	if err == nil && w.qp.send.failed != nil {
		err = w.qp.send.failed
		if w.ah != nil {
			w.ah.Close()
		}
	}
	if err != nil {
		r.failed(pe, now, err)
		return
	}
	pe.err, pe.viaUDP = nil, false
	if w.ah == nil && pe.path != nil {
		pe.answeredAsBefore()
	} else {
		pe.setPath(w)
		pe.staleAfter, pe.suspected = r.Bounds.MinSilence, false // The suspicion was right.
		if w.plain {
			r.peers.addPlain(pe.addr, w.to.QPN)
		}
	}
	r.sendWaiting(pe)
}

// sendWaiting sends what has waited for the path. The caller holds sender.mu, but not while
// the send queue is full.
func (r *resolver) sendWaiting(pe *peer) {
	for len(pe.waiting) > 0 && pe.path != nil && !r.closed.Load() {
		if err := pe.path.qp.send.post(pe.waiting[0], &pe.path.destination); err == errNoRoom {
			pe.path.qp.send.awaitRoom()
			continue
		} else if err != nil {
			r.unsent.Add(1)
		}
		pe.waiting = pe.waiting[1:]
	}
	if len(pe.waiting) == 0 {
		pe.waiting = nil
	}
}

// failed takes the outcome that no path by RDMA was found. A known path is given up only if
// the peer's host says that nobody serves the address, or if the path's queue pair has
// failed. The caller holds sender.mu.
func (r *resolver) failed(pe *peer, now time.Duration, err error) {
	r.failures.Add(1)
	refused := errors.Is(err, errno.ECONNREFUSED)
	if pe.path != nil && !refused && pe.path.qp.send.failed == nil {
		pe.answeredAsBefore()
		for _, b := range pe.waiting {
			if pe.path.qp.send.post(b, &pe.path.destination) != nil {
				r.unsent.Add(1)
			}
		}
		pe.waiting = nil
		return
	}
	pe.dropPath()
	if !r.closed.Load() {
		r.Log.Debug("rdmanet: no way for datagrams", "local", r.laddr, "remote", pe.addr, "err", err)
	}
	if r.udp != nil && !r.closed.Load() {
		pe.viaUDP, pe.next, pe.err = true, now+r.Bounds.UDPPause, nil
		for _, b := range pe.waiting {
			if r.udp.send(b, pe.addr) != nil {
				r.unsent.Add(1)
			}
		}
		pe.waiting = nil
		return
	}
	pe.err, pe.next = neterr.Setup(err), now+r.Bounds.FailurePause
	pe.discardWaiting()
	if r.remote == pe.addr && !r.closed.Load() {
		err := pe.err
		r.wg.Go(func() { r.recv.report(err) })
	}
}

// lookUp requests the queue pair that serves an address. The request or its reply may be lost. Linux
// repeats a request after four seconds only, so it is made anew before that.
func (r *resolver) lookUp(ctx context.Context, addr netip.AddrPort) (w *path, err error) {
	switch {
	case addr.Addr().IsMulticast():
		return r.groups.path(ctx, addr)
	case isNetBroadcast(addr.Addr()):
		return nil, errNoBroadcast(r.Software)
	}
	timeouts := r.Bounds.Timeouts
	if r.overUDP {
		timeouts = r.Bounds.TimeoutsBesideUDP
	}
	for _, timeout := range timeouts {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		w, err = r.request(ctx, addr)
		cancel()
		if err == nil || !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, syscall.ETIMEDOUT) {
			break
		}
	}
	return w, err
}

func (r *resolver) request(ctx context.Context, addr netip.AddrPort) (w *path, err error) {
	var local netip.AddrPort
	if a := r.local.Addr(); a.IsValid() && !a.IsUnspecified() {
		local = netip.AddrPortFrom(a, 0)
	}
	id, err := r.qps.provider.ResolveUD(ctx, local, addr)
	if err != nil {
		return nil, err
	}
	defer id.Close()
	q, err := r.qps.forID(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := id.Connect(ctx, ibv.ConnParam{Private: q.privateData()}); err != nil {
		return nil, err
	}
	_, rdmanet := ParsePrivateData(id.PrivateData())
	return &path{qp: q, destination: destination{to: id.UDParam(), plain: !rdmanet}}, nil
}
