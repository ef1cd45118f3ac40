package smbdpeer

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// Dial connects and negotiates.
func Dial(ctx context.Context, provider ibv.Provider, to netip.AddrPort) (*Peer, error) {
	id, err := provider.Resolve(ctx, netip.AddrPort{}, to)
	if err != nil {
		return nil, err
	}
	p, err := newPeer(id)
	if err != nil {
		return nil, err
	}
	if err := id.Connect(ctx, p.param()); err != nil {
		p.abandon()
		return nil, err
	}
	p.serveBehind()
	le := binary.LittleEndian
	var b []byte
	for _, v := range []uint16{version, version, 0, 255} {
		b = le.AppendUint16(b, v)
	}
	for _, v := range []uint32{receiveSize, receiveSize, fragmented} {
		b = le.AppendUint32(b, v)
	}
	if err := p.post(b); err != nil {
		p.Close()
		return nil, err
	}
	resp, err := p.negotiation(ctx, 32)
	if err == nil && (le.Uint32(resp[12:]) != 0 || le.Uint16(resp[4:]) != version) {
		err = fmt.Errorf("smbdpeer: refused: % x", resp)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	p.mu.Lock()
	p.credits += int(le.Uint16(resp[10:]))
	p.maxSend = min(receiveSize, max(minSendSize, int(le.Uint32(resp[24:]))))
	p.owed = receives - 1
	p.mu.Unlock()
	// The first message grants what the other end needs to send at all.
	return p, p.grant()
}

// A Listener accepts connections.
type Listener struct{ ln ibv.Listener }

// Listen listens.
func Listen(ctx context.Context, provider ibv.Provider, local netip.AddrPort) (*Listener, error) {
	ln, err := provider.Listen(ctx, local, 0)
	if err != nil {
		return nil, err
	}
	return &Listener{ln}, nil
}

// Addr is where it listens.
func (l *Listener) Addr() netip.AddrPort { return l.ln.Addr() }

// Close ends it.
func (l *Listener) Close() error { return l.ln.Close() }

// Accept takes the next connection and negotiates.
func (l *Listener) Accept(ctx context.Context) (*Peer, error) {
	id, err := l.ln.Accept(ctx)
	if err != nil {
		return nil, err
	}
	p, err := newPeer(id)
	if err != nil {
		return nil, err
	}
	if err := id.Accept(ctx, p.param()); err != nil {
		p.abandon()
		return nil, err
	}
	p.serveBehind()
	req, err := p.negotiation(ctx, 20)
	if err != nil {
		p.Close()
		return nil, err
	}
	le := binary.LittleEndian
	p.mu.Lock()
	p.maxSend = min(receiveSize, max(minSendSize, int(le.Uint32(req[12:]))))
	p.mu.Unlock()
	var b []byte
	for _, v := range []uint16{version, version, version, 0, 255, receives - 1} {
		b = le.AppendUint16(b, v)
	}
	for _, v := range []uint32{0, 1 << 20, uint32(p.maxSend), min(receiveSize, max(minSendSize, le.Uint32(req[8:]))), fragmented} {
		b = le.AppendUint32(b, v)
	}
	if err := p.post(b); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// param has what a plain peer tells of itself, which is the depths of RDMA Reads alone.
func (p *Peer) param() ibv.ConnParam {
	be := binary.BigEndian
	return ibv.ConnParam{Private: be.AppendUint32(be.AppendUint32(nil, 1), 1), ResponderResources: 1, InitiatorDepth: 1}
}

func newPeer(id ibv.ID) (p *Peer, err error) {
	p = &Peer{id: id, done: make(chan struct{}), recvs: make([]byte, receives*receiveSize), sendsB: make([]byte, sends*receiveSize),
		maxSend: receiveSize}
	p.changed.L = &p.mu
	defer func() {
		if err != nil {
			p.abandon()
		}
	}()
	dev := id.Device()
	if p.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	if p.cq, err = dev.CreateCQ(receives + sends + 2); err != nil {
		return nil, err
	}
	if p.recvMR, err = p.pd.RegMR(p.recvs, ibv.AccessLocalWrite); err != nil {
		return nil, err
	}
	if p.sendMR, err = p.pd.RegMR(p.sendsB, 0); err != nil {
		return nil, err
	}
	if p.qp, err = id.CreateQP(p.pd, ibv.QPInit{SendCQ: p.cq, RecvCQ: p.cq,
		Cap: ibv.QPCap{MaxSendWR: sends + 1, MaxRecvWR: receives, MaxSendSGE: 1, MaxRecvSGE: 1}}); err != nil {
		return nil, err
	}
	for i := range sends {
		p.free = append(p.free, i)
	}
	for i := range receives {
		if err = p.receive(i); err != nil {
			return nil, err
		}
	}
	id.Notify(func(e ibv.Event) {
		if e.Kind == ibv.EventDisconnected || e.Kind == ibv.EventQPFatal {
			go p.disconnected(e.Err) // the device may call from inside a post, with mu held
		}
	})
	return p, nil
}

// abandon gives back what there is of a peer that serve does not run for.
func (p *Peer) abandon() {
	p.end(net.ErrClosed) // nobody tells cq of events any more
	if p.qp != nil {
		p.qp.Close()
	}
	if p.cq != nil {
		p.cq.Close()
	}
	for _, mr := range []ibv.MR{p.recvMR, p.sendMR} {
		if mr != nil {
			mr.Close()
		}
	}
	if p.pd != nil {
		p.pd.Close()
	}
	p.id.Close()
}
