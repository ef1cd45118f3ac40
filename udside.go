package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// udSide is the RDMA devices of a PacketConn: who they are reached by, and how others
// are found. rdma_cm's port space of UDP resolves an address to a queue pair by one
// question and its answer (SIDR, the InfiniBand architecture's service ID resolution).
type udSide struct {
	p        *packetConn
	provider ibv.Provider
	listener ibv.Listener
	peers    *udPeers
	limit    int
	turns    chan struct{} // one for each resolver

	opening sync.Mutex // one queue pair is made at a time; goes before rmu and wmu

	// Changed with rmu and wmu held, in that order.
	links []*udQP
	first *udQP // that readers lead
}

// openUD binds the address on RDMA devices. A specific one takes its device now, others
// when a peer needs it.
func (p *packetConn) openUD(ctx context.Context, provider ibv.Provider, local netip.AddrPort) error {
	u := &udSide{p: p, provider: provider, peers: newUDPeers(), turns: make(chan struct{}, resolvers)}
	before, beforeAddr := p.local, p.laddr
	ln, err := provider.ListenUD(ctx, local, 0)
	switch {
	case err == nil:
		u.listener = ln
		p.at(ln.Addr())
	case p.group.IsValid() && inUse(err): // questions are another's, groups everybody's
		p.at(local)
	default:
		return err
	}
	p.ud = u
	if local.Addr().IsValid() && !local.Addr().IsUnspecified() {
		_, err = u.open(ctx, local.Addr())
	} else {
		err = u.limitOfAll()
	}
	if err != nil {
		p.ud, p.local, p.laddr = nil, before, beforeAddr
		if u.listener != nil {
			err = errors.Join(err, ln.Close())
		}
		return err
	}
	return nil
}

// limitOfAll finds the limit where any device may be used.
func (u *udSide) limitOfAll() error {
	devs, err := u.provider.Devices()
	if err != nil {
		return err
	}
	why, found := fmt.Errorf("%s: no device for datagrams: %w", u.provider.Name(), errors.ErrUnsupported), false
	for _, dev := range devs {
		if err := carries(dev); err != nil {
			why = err
			continue
		}
		found = true
		for port := 1; port <= dev.Attr().Ports; port++ {
			attr, err := dev.Port(port)
			if err != nil {
				return err
			}
			if attr.State == ibv.PortActive && (u.limit == 0 || attr.ActiveMTU < u.limit) {
				u.limit = min(attr.ActiveMTU, maxUDPayload)
			}
		}
	}
	switch {
	case !found:
		return why
	case u.limit == 0:
		return fmt.Errorf("%s: all ports are down: %w", u.provider.Name(), errno.ENETDOWN)
	}
	return nil
}

// carries makes sure that a device has datagrams, and such that their sender can be
// told: InfiniBand's own addresses are no IP addresses.
func carries(dev ibv.Device) error {
	attr := dev.Attr()
	switch {
	case !attr.Caps.Has(ibv.CapUD):
		return ibv.Unsupported(dev.Name(), "datagrams (UD queue pairs)")
	case attr.Transport != ibv.TransportRoCE:
		return ibv.Unsupported(dev.Name(), "datagrams from IP addresses over "+attr.Transport.String())
	}
	return nil
}

// open returns the queue pair of the device that has a local address.
func (u *udSide) open(ctx context.Context, ip netip.Addr) (*udQP, error) {
	u.opening.Lock()
	defer u.opening.Unlock()
	id, err := u.provider.BindUD(ctx, netip.AddrPortFrom(ip, 0))
	if err != nil {
		return nil, err
	}
	if l := u.find(id.Device(), id.Port()); l != nil {
		return l, id.Close()
	}
	if err := carries(id.Device()); err != nil {
		return nil, errors.Join(err, id.Close())
	}
	limit, err := udMTU(id.Device(), id.Port())
	if err != nil {
		return nil, errors.Join(err, id.Close())
	}
	p := u.p
	l, err := p.newUDQP(id)
	if err != nil {
		return nil, err
	}
	p.rmu.Lock()
	defer p.rmu.Unlock()
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.closed.Load() {
		return nil, errors.Join(net.ErrClosed, l.close())
	}
	if u.limit == 0 {
		u.limit = limit
	}
	l.listen(u.first != nil)
	u.links = append(u.links, l)
	l.id.Notify(l.event) // not before: what is not listed cannot be dropped
	if u.first != nil {
		p.wg.Go(l.wait.Run)
	} else {
		u.first = l
		l.wait.Start()
		p.readers.WakeAll() // one of those that wait leads
	}
	return l, nil
}

// link returns the queue pair of the device and port of an ID.
func (u *udSide) link(ctx context.Context, id ibv.ID) (*udQP, error) {
	if l := u.find(id.Device(), id.Port()); l != nil {
		return l, nil
	}
	return u.open(ctx, id.LocalAddr().Addr())
}

func (u *udSide) find(dev ibv.Device, port int) *udQP {
	u.p.wmu.Lock()
	defer u.p.wmu.Unlock()
	for _, l := range u.links {
		if l.id.Device() == dev && l.id.Port() == port {
			return l
		}
	}
	return nil
}

// drop gives a queue pair up that failed. The next peer that asks, or is asked for,
// makes a new one.
func (u *udSide) drop(l *udQP, cause error) {
	p := u.p
	p.rmu.Lock()
	p.wmu.Lock()
	i := slices.Index(u.links, l)
	if i < 0 {
		p.wmu.Unlock()
		p.rmu.Unlock()
		return
	}
	p.log.Debug("rdmanet: queue pair for datagrams failed", "device", l.id.Device().Name(), "local", p.laddr, "err", cause)
	u.links = slices.Delete(u.links, i, i+1)
	if u.first == l {
		u.first = nil
	}
	l.dropped = true
	if l.failed == nil {
		l.failed = cause
	}
	u.peers.mu.RLock()
	for _, pe := range u.peers.m {
		if pe.way != nil && pe.way.link == l {
			u.leave(pe)
		}
	}
	u.peers.mu.RUnlock()
	l.sendWait.Interrupt()
	p.writers.WakeAll()
	p.wmu.Unlock()
	l.wait.Stop()
	p.readers.WakeAll() // they wait for another queue pair from now on
	p.rmu.Unlock()
	p.wmu.Lock()
	l.sendWait.Stop()
	for l.creating > 0 {
		p.writers.Wait()
	}
	p.wmu.Unlock()
	p.joining.Lock()
	err := l.close()
	p.joining.Unlock()
	if err != nil {
		p.log.Debug("rdmanet: queue pair for datagrams", "device", l.id.Device().Name(), "err", err)
	}
	u.rejoin(l)
}

// leave gives up the way to a peer. The caller holds wmu.
func (u *udSide) leave(pe *udPeer) {
	if pe.way != nil {
		pe.way.link.retire(pe.way.ah)
		pe.way = nil
		pe.qpn.Store(0)
	}
}

// release gives everything back, of a PacketConn that is shut and has no more
// goroutines of its own.
func (u *udSide) release() (err error) {
	p := u.p
	linger := p.cfg.LingerTimeout
	if linger == 0 {
		linger = defaultLinger
	}
	until := time.Now().Add(linger)
	for _, l := range u.links {
		p.rmu.Lock()
		l.wait.Stop()
		p.rmu.Unlock()
		p.wmu.Lock()
		l.sendWait.Stop()
		p.wmu.Unlock()
		l.drain(until)
	}
	for _, pe := range u.peers.m {
		u.leave(pe)
		p.stats.unsent.Add(uint64(len(pe.waiting)))
		pe.waiting = nil
	}
	for _, l := range u.links {
		err = errors.Join(err, l.close())
	}
	return err
}

// count returns the peers that are known, and the receives that are posted.
func (u *udSide) count() (peers, receives int) {
	u.p.wmu.Lock()
	defer u.p.wmu.Unlock()
	for _, l := range u.links {
		receives += len(l.slots)
	}
	u.peers.mu.RLock()
	defer u.peers.mu.RUnlock()
	return len(u.peers.m), receives
}

// sender finds the address that a datagram is from. The caller holds rmu.
func (u *udSide) sender(l *udQP, host netip.Addr, wc *ibv.WC) (addr netip.AddrPort, ok bool) {
	if wc.Flags&ibv.WCWithImm != 0 {
		if port, ok := portOf(wc.Imm); ok {
			return u.peers.from(host, port, wc.SrcQP), true
		}
	}
	addr, first, ok := u.peers.fromPlain(host, wc.SrcQP)
	if first {
		u.adopt(l, addr, wc)
	}
	return addr, ok
}

// adopt takes the way to a peer that is not rdmanet, and can be asked for nothing, from
// the first datagram that it has sent since it asked for us. The caller holds rmu.
func (u *udSide) adopt(l *udQP, addr netip.AddrPort, wc *ibv.WC) {
	p := u.p
	p.wmu.Lock()
	defer p.wmu.Unlock()
	pe := u.peer(addr)
	if p.closed.Load() || pe == nil || pe.resolving || !u.peers.know(addr, wc.SrcQP) {
		return // the next one may
	}
	u.peers.heed(addr.Addr())
	if w := pe.way; w != nil && (!w.learnt || w.link == l && w.to.QPN == wc.SrcQP) {
		return
	}
	pe.resolving = true
	w := &way{link: l, to: ibv.UDParam{QPN: wc.SrcQP, QKey: ibv.QKeyUDP}, plain: true, learnt: true}
	from, header := *wc, slices.Clone(l.slots[wc.ID].Buf[:ibv.GRHLen])
	p.wg.Go(func() {
		p.wmu.Lock()
		defer p.wmu.Unlock()
		err := l.createAH(w, func(pd ibv.PD) (ibv.AH, error) { return pd.CreateAHFromWC(l.id.Port(), &from, header) })
		u.resolved(pe, w, err)
	})
}

// What to do with a datagram.
type verdict int

const (
	toPost verdict = iota // on the peer's way
	toKeep                // until the peer is resolved
	toDrop
	toAsk // for the way to a group first
	toUDP // the peer is reached by the software device
)

// judge says what to do with a datagram, and says so again if it is asked again. The
// caller holds wmu.
func (u *udSide) judge(d *Datagram) (pe *udPeer, v verdict, err error) {
	to := u.p.target(d)
	switch err := u.p.check(d.Buf, to); {
	case err != nil:
		return nil, 0, err
	case u.p.closed.Load():
		return nil, 0, net.ErrClosed
	case u.p.writeDue.Expired():
		return nil, 0, os.ErrDeadlineExceeded
	case u.p.byUDP(to):
		return nil, toUDP, nil
	}
	now := u.p.now()
	if pe = u.peer(to); pe == nil {
		return nil, toDrop, nil
	}
	pe.used = now
	switch {
	case pe.way == nil && pe.err != nil && now < pe.next:
		return pe, 0, pe.err
	case pe.way == nil && to.Addr().IsMulticast():
		return pe, toAsk, nil
	case pe.soft && now >= pe.next && !u.peers.viaSoft(to, now):
		u.ask(pe)
	case pe.way == nil && !pe.soft, pe.doubted(now):
		u.ask(pe)
		return pe, toKeep, nil
	case len(pe.waiting) > 0:
		return pe, toKeep, nil
	case !pe.soft && pe.stale(now):
		u.ask(pe)
	}
	if pe.soft {
		return pe, toUDP, nil
	}
	return pe, toPost, nil
}

// write sends the first datagrams: as many as one queue pair takes at a time, then one
// that does not go by that, or is kept until it is known where to. It returns how many,
// and why not the next one; none and no error if it had to wait. Between two calls
// others have their turn.
func (u *udSide) write(ds []Datagram) (n int, err error) {
	p := u.p
	p.wmu.Lock()
	defer p.wmu.Unlock()
	var l *udQP // that has ds[:n] staged, which is to be posted before wmu is let go of
	var pe *udPeer
	var v verdict
	for n < len(ds) {
		if pe, v, err = u.judge(&ds[n]); err != nil || v != toPost || l != nil && l != pe.way.link {
			break
		}
		if err = pe.way.link.stage(ds[n].Buf, pe.way); err != nil {
			break
		}
		l = pe.way.link
		n++
	}
	if l != nil {
		unsent, failed := l.flush()
		n -= unsent
		switch {
		case failed == errNoRoom:
			l.awaitRoom()
			return n, nil
		case failed != nil:
			return n, failed
		case err == errNoRoom:
			return n, nil
		}
	}
	switch {
	case err == errNoRoom:
		pe.way.link.awaitRoom()
		return n, nil
	case err != nil, v == toPost:
		return n, err
	}
	switch d := &ds[n]; v {
	case toAsk:
		u.askNow(pe)
		return n, nil
	case toKeep:
		u.wait(pe, d.Buf)
	case toDrop:
		p.stats.unsent.Add(1)
	case toUDP:
		p.wmu.Unlock()
		err = p.soft.send(d.Buf, p.target(d))
		p.wmu.Lock()
		if err != nil {
			return n, err
		}
	}
	return n + 1, nil
}

// peer returns what is known of an address, which is at first whether it can be
// answered by the software device. The caller holds wmu.
func (u *udSide) peer(addr netip.AddrPort) *udPeer {
	if pe := u.peers.get(addr); pe != nil {
		return pe
	}
	pe, evicted := u.peers.add(addr)
	if evicted != nil {
		u.leave(evicted)
		u.p.stats.unsent.Add(uint64(len(evicted.waiting)))
	}
	if pe != nil && u.p.soft != nil && u.peers.viaSoft(addr, u.p.now()) {
		pe.soft, pe.next = true, u.p.now()+softPause
	}
	return pe
}

// wait keeps a copy of a datagram for a peer that is being resolved. The caller holds
// wmu.
func (u *udSide) wait(pe *udPeer, b []byte) {
	if len(pe.waiting) >= maxWaiting {
		u.p.stats.unsent.Add(1)
		return
	}
	pe.waiting = append(pe.waiting, slices.Clone(b))
}

// ask has a peer resolved, once at a time. The caller holds wmu.
func (u *udSide) ask(pe *udPeer) {
	if pe.resolving {
		return
	}
	pe.resolving = true
	u.p.wg.Go(func() {
		select {
		case u.turns <- struct{}{}:
			u.resolve(u.p.ctx, pe)
			<-u.turns
		case <-u.p.ctx.Done():
		}
	})
}

// askNow waits for the way to a group, which no peer has a say in, until something may
// have changed. The caller holds wmu, but not meanwhile.
func (u *udSide) askNow(pe *udPeer) {
	p := u.p
	if !pe.resolving {
		pe.resolving = true
		p.wg.Go(func() { u.resolve(p.ctx, pe) })
	}
	p.writers.Wait()
}

// resolve finds the way to a peer, and returns why there is none.
func (u *udSide) resolve(ctx context.Context, pe *udPeer) error {
	p := u.p
	p.stats.resolutions.Add(1)
	w, err := u.lookUp(ctx, pe.addr)
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if old := pe.way; err == nil && (old == nil || old.link != w.link || old.to != w.to || old.plain != w.plain) {
		err = w.link.createAH(w, func(pd ibv.PD) (ibv.AH, error) { return pd.CreateAH(w.to.AH) })
	}
	u.resolved(pe, w, err)
	return err
}

// resolved takes the outcome of resolving: a way, without an address handle if it is
// the one that is known. The caller holds wmu.
func (u *udSide) resolved(pe *udPeer, w *way, err error) {
	p, now := u.p, u.p.now()
	defer p.writers.WakeAll() // to who waits for a group
	pe.resolving, pe.asked = false, now
	pe.suspect.Store(false)
	if err == nil && w.link.failed != nil {
		err = w.link.failed
		if w.ah != nil {
			w.ah.Close()
		}
	}
	if err != nil {
		u.unresolved(pe, now, err)
		return
	}
	pe.err, pe.soft = nil, false
	if w.ah == nil && pe.way != nil {
		pe.patience = min(2*pe.patience, maxPatience)
	} else {
		u.leave(pe)
		pe.way, pe.patience, pe.doubts = w, minPatience, false // there was reason to doubt
		pe.qpn.Store(w.to.QPN)
		if w.plain {
			u.peers.know(pe.addr, w.to.QPN)
		}
	}
	for len(pe.waiting) > 0 && pe.way != nil && !p.closed.Load() {
		if err := pe.way.link.post(pe.waiting[0], pe.way); err == errNoRoom {
			pe.way.link.awaitRoom()
			continue
		} else if err != nil {
			p.stats.unsent.Add(1)
		}
		pe.waiting = pe.waiting[1:]
	}
	if len(pe.waiting) == 0 {
		pe.waiting = nil
	}
}

// unresolved takes the outcome that there is no way by RDMA. A way that is known is
// given up only when the peer's host says that nobody is there. The caller holds wmu.
func (u *udSide) unresolved(pe *udPeer, now time.Duration, err error) {
	p := u.p
	p.stats.failures.Add(1)
	refused := errors.Is(err, errno.ECONNREFUSED)
	if pe.way != nil && !refused && pe.way.link.failed == nil {
		pe.patience = min(2*pe.patience, maxPatience)
		for _, b := range pe.waiting {
			if pe.way.link.post(b, pe.way) != nil {
				p.stats.unsent.Add(1)
			}
		}
		pe.waiting = nil
		return
	}
	u.leave(pe)
	if !p.closed.Load() {
		p.log.Debug("rdmanet: no way for datagrams", "local", p.laddr, "remote", pe.addr, "err", err)
	}
	if p.soft != nil && !p.closed.Load() {
		pe.soft, pe.next, pe.err = true, now+softPause, nil
		for _, b := range pe.waiting {
			if p.soft.send(b, pe.addr) != nil {
				p.stats.unsent.Add(1)
			}
		}
		pe.waiting = nil
		return
	}
	pe.err, pe.next = dialError(err), now+failurePause
	p.stats.unsent.Add(uint64(len(pe.waiting)))
	pe.waiting = nil
	if p.remote == pe.addr && !p.closed.Load() {
		err := pe.err
		p.wg.Go(func() { p.tell(err) })
	}
}

// lookUp asks which queue pair serves an address. A question or its answer may be lost,
// and Linux repeats it after four seconds only, so it is asked anew before that.
func (u *udSide) lookUp(ctx context.Context, addr netip.AddrPort) (w *way, err error) {
	switch {
	case addr.Addr().IsMulticast():
		return u.groupWay(ctx, addr)
	case isNetBroadcast(addr.Addr()):
		return nil, errNoBroadcast
	}
	tries := questionTimes
	if u.p.soft != nil {
		tries = questionTimesBeside
	}
	for _, patience := range tries {
		ctx, cancel := context.WithTimeout(ctx, patience)
		w, err = u.question(ctx, addr)
		cancel()
		if err == nil || !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, syscall.ETIMEDOUT) {
			break
		}
	}
	return w, err
}

func (u *udSide) question(ctx context.Context, addr netip.AddrPort) (w *way, err error) {
	var local netip.AddrPort
	if a := u.p.local.Addr(); a.IsValid() && !a.IsUnspecified() {
		local = netip.AddrPortFrom(a, 0)
	}
	id, err := u.provider.ResolveUD(ctx, local, addr)
	if err != nil {
		return nil, err
	}
	defer id.Close()
	l, err := u.link(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := id.Connect(ctx, ibv.ConnParam{Private: u.greeting(l)}); err != nil {
		return nil, err
	}
	_, rdmanet := parseGreeting(id.PrivateData())
	return &way{link: l, to: id.UDParam(), plain: !rdmanet}, nil
}

func (u *udSide) greeting(l *udQP) []byte {
	return greeting{port: u.p.local.Port(), qpn: l.qp.QPN()}.append(nil)
}

// serve answers who asks which queue pair serves our address.
func (u *udSide) serve() {
	p := u.p
	for {
		id, err := u.listener.Accept(p.ctx)
		switch {
		case err == nil:
			if err := u.answer(id); err != nil {
				p.log.Debug("rdmanet: question about datagrams", "local", p.laddr, "remote", id.RemoteAddr(), "err", err)
			}
		case p.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, errno.ENODEV):
			p.log.Debug("rdmanet: receives no datagrams any more", "local", p.laddr, "err", err)
			if p.soft == nil {
				p.rmu.Lock()
				p.lost = err
				p.wakeReaders()
				p.rmu.Unlock()
			}
			return
		default: // nothing to do but to try again, not at once
			select {
			case <-time.After(10 * time.Millisecond):
			case <-p.ctx.Done():
			}
		}
	}
}

func (u *udSide) answer(id ibv.ID) error {
	defer id.Close()
	asker := id.RemoteAddr()
	if u.p.remote.IsValid() && asker.Addr() != u.p.remote.Addr() {
		return errors.Join(errors.New("not the peer"), id.Reject(nil))
	}
	l, err := u.link(u.p.ctx, id)
	if err != nil {
		return errors.Join(err, id.Reject(nil))
	}
	if g, ok := parseGreeting(id.PrivateData()); !ok {
		u.peers.ask(asker)
	} else if pe := u.peers.get(netip.AddrPortFrom(asker.Addr(), g.port)); pe != nil {
		pe.moved(g.qpn)
	}
	return id.Accept(u.p.ctx, ibv.ConnParam{QPN: l.qp.QPN(), Private: u.greeting(l)})
}
