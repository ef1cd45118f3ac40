package udconn

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// responder replies to requests for this Conn's address with the queue pair that serves it.
type responder struct {
	*shared
	listener ibv.Listener
	qps      *queuePairs
	peers    *peerTable
	recv     *receiver
}

// serve replies to requests until the Conn is closed or the device is removed.
func (r *responder) serve() {
	for {
		id, err := r.listener.Accept(r.ctx)
		switch {
		case err == nil:
			if err := r.reply(id); err != nil {
				r.Log.Debug("rdmanet: question about datagrams", "local", r.laddr, "remote", id.RemoteAddr(), "err", err)
			}
		case r.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, errno.ENODEV):
			r.Log.Debug("rdmanet: receives no datagrams any more", "local", r.laddr, "err", err)
			if !r.overUDP {
				r.recv.lose(err)
			}
			return
		default:
			select {
			case <-time.After(10 * time.Millisecond): // The error may be there to stay.
			case <-r.ctx.Done():
			}
		}
	}
}

func (r *responder) reply(id ibv.ID) error {
	defer id.Close()
	requester := id.RemoteAddr()
	if r.connected() && requester.Addr() != r.remote.Addr() {
		return errors.Join(errors.New("not the peer"), id.Reject(nil))
	}
	q, err := r.qps.forID(r.ctx, id)
	if err != nil {
		return errors.Join(err, id.Reject(nil))
	}
	if p, ok := ParsePrivateData(id.PrivateData()); !ok {
		r.peers.addRequester(requester)
	} else if pe := r.peers.get(netip.AddrPortFrom(requester.Addr(), p.Port)); pe != nil {
		pe.seenAt(p.QPN)
	}
	return id.Accept(r.ctx, ibv.ConnParam{QPN: q.qp.QPN(), Private: q.privateData()})
}
