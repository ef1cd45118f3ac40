package smbdpeer

import (
	"context"
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
	req := NegotiateRequest{MinVersion: Version, MaxVersion: Version, CreditsRequested: 255,
		PreferredSendSize: receiveSize, MaxReceiveSize: receiveSize, MaxFragmentedSize: fragmented}
	if err := p.post(req.Append(nil)); err != nil {
		p.Close()
		return nil, err
	}
	var resp NegotiateResponse
	b, err := p.negotiation(ctx, NegotiateResponseLen)
	if err == nil {
		resp, err = ParseNegotiateResponse(b)
	}
	if err == nil && (resp.Status != StatusSuccess || resp.NegotiatedVersion != Version) {
		err = fmt.Errorf("smbdpeer: refused: %+v", resp)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	p.mu.Lock()
	p.credits += int(resp.CreditsGranted)
	p.maxSend = min(receiveSize, max(minSendSize, int(resp.MaxReceiveSize)))
	p.owed = receives - 1
	p.mu.Unlock()
	// The first message grants credits, which the other end needs to send.
	return p, p.grant()
}

// A Listener accepts connections.
type Listener struct{ ln ibv.Listener }

// Listen returns a listener.
func Listen(ctx context.Context, provider ibv.Provider, local netip.AddrPort) (*Listener, error) {
	ln, err := provider.Listen(ctx, local, 0)
	if err != nil {
		return nil, err
	}
	return &Listener{ln}, nil
}

// Addr returns the address of the listener.
func (l *Listener) Addr() netip.AddrPort { return l.ln.Addr() }

// Close closes the listener.
func (l *Listener) Close() error { return l.ln.Close() }

// Accept waits for the next connection and negotiates.
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
	var req NegotiateRequest
	b, err := p.negotiation(ctx, NegotiateRequestLen)
	if err == nil {
		req, err = ParseNegotiateRequest(b)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	p.mu.Lock()
	p.maxSend = min(receiveSize, max(minSendSize, int(req.MaxReceiveSize)))
	p.mu.Unlock()
	resp := NegotiateResponse{MinVersion: Version, MaxVersion: Version, NegotiatedVersion: Version,
		CreditsRequested: 255, CreditsGranted: receives - 1, MaxReadWriteSize: 1 << 20, PreferredSendSize: uint32(p.maxSend),
		MaxReceiveSize: min(receiveSize, max(minSendSize, req.PreferredSendSize)), MaxFragmentedSize: fragmented}
	if err := p.post(resp.Append(nil)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// param returns the parameters of a plain peer: only the depths of RDMA Reads.
func (p *Peer) param() ibv.ConnParam {
	return ibv.ConnParam{Private: PrivateData{IRD: 1, ORD: 1}.Append(nil), ResponderResources: 1, InitiatorDepth: 1}
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
			go p.disconnected(e.Err) // The device may call it inside a post, with mu held.
		}
	})
	return p, nil
}

// abandon releases the objects of a peer for which serve does not run.
func (p *Peer) abandon() {
	p.end(net.ErrClosed) // No event reaches cq any more.
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
