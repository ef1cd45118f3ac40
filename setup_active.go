package rdmanet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file has the active side of the set-up of a connection, which setup.go describes.

// connect makes a connection on the active side out of a resolved ID, which it takes over.
func connect(ctx context.Context, cfg *Config, id ibv.ID) (*conn, error) {
	s, err := begin(cfg, id, false)
	if err != nil {
		return nil, err
	}
	// Without a NegotiateTimeout the device bounds the connecting itself.
	if cfg.NegotiateTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, s.due)
		defer cancel()
	}
	c, err := s.initiate(ctx)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		// Linux keeps an iWARP ID until the peer has answered, or for 10 s.
		go s.abandon()
	default:
		s.abandon()
	}
	return nil, err
}

// initiate connects and negotiates on the active side.
func (s *setup) initiate(ctx context.Context) (*conn, error) {
	// The receives are for the first messages, and are granted in an early negotiation.
	err := s.expect(s.set.initial, s.set.maxReceive)
	if errors.Is(err, errno.ENOBUFS) && len(s.posted) >= minCredits {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	var b [negotiateRequestLen + 2]byte
	lim := s.set.limits(privateData{rdmanet: true})
	req := lim.request()
	n := req.put(b[:])
	binary.LittleEndian.PutUint16(b[n:], uint16(len(s.posted)))
	if err := s.id.Connect(ctx, s.param(b[:])); err != nil {
		return nil, explain(err)
	}
	peer := parsePrivate(s.id.PrivateData())
	if answer := earlyResponse(s.id.PrivateData()); answer != nil {
		a, err := lim.acceptResponse(answer)
		if err != nil {
			return nil, err
		}
		c, err := s.newConn(a, peer, true)
		if err == nil {
			c.early = true
			c.start()
		}
		return c, err
	}
	lim = s.set.limits(peer)
	req = lim.request()
	if err := s.sendMessage(b[:req.put(b[:])]); err != nil {
		return nil, err
	}
	answer, err := s.receiveMessage(ctx)
	if err != nil {
		return nil, fmt.Errorf("smb direct negotiation: %w", err)
	}
	a, err := lim.acceptResponse(answer)
	if err != nil {
		return nil, err
	}
	return s.establish(a, peer, nil)
}

// explain adds the peer's reason to the error of a rejected connection, if the rejection
// carries one.
func explain(err error) error {
	var r *ibv.RejectError
	if !errors.As(err, &r) {
		return err
	}
	if answer := earlyResponse(r.Private); answer != nil {
		if _, why := new(limits).acceptResponse(answer); why != nil {
			return fmt.Errorf("%w: %w", err, why)
		}
	}
	return err
}
