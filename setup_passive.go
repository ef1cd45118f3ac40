package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file has the passive side of the set-up of a connection, which setup.go describes.

// accept makes a connection on the passive side out of a connection request, whose ID it
// takes over.
func accept(ctx context.Context, cfg *Config, id ibv.ID) (*conn, error) {
	s, err := begin(cfg, id, true)
	if err != nil {
		return nil, err
	}
	c, err := s.respond(ctx)
	if err != nil {
		s.decline(err)
		s.abandon()
		return nil, err
	}
	return c, nil
}

// respond accepts and negotiates on the passive side.
func (s *setup) respond(ctx context.Context) (*conn, error) {
	peer := parsePrivate(s.id.PrivateData())
	lim := s.set.limits(peer)
	if c, err := s.respondEarly(ctx, lim, peer); c != nil || err != nil {
		return c, err
	}
	if err := s.expect(1, negotiateBuf); err != nil {
		return nil, err
	}
	if err := s.id.Accept(ctx, s.param(nil)); err != nil {
		return nil, err
	}
	request, err := s.receiveMessage(ctx)
	if err != nil {
		return nil, fmt.Errorf("smb direct negotiation: %w", err)
	}
	a, resp, status, err := lim.acceptRequest(request)
	if err != nil {
		if status != statusOK {
			s.refuse(ctx, resp)
		}
		return nil, err
	}
	c, err := s.establish(a, peer, &resp)
	if errors.Is(err, errno.ENOBUFS) {
		s.refuse(ctx, refusal(statusInsufficientResources))
	}
	return c, err
}

// respondEarly negotiates by the private data if the peer has begun so. It returns nil
// without an error if that cannot be done. Without an answer the peer asks again by a
// message, and the answer to that message can be a refusal.
func (s *setup) respondEarly(ctx context.Context, lim limits, peer privateData) (*conn, error) {
	request, granted := earlyRequest(s.id.PrivateData())
	if request == nil || !s.id.MaySendFirst() || s.id.Device().Attr().MaxPrivateData < earlyResponseLen {
		return nil, nil
	}
	a, resp, _, err := lim.acceptRequest(request)
	if err != nil {
		return nil, nil
	}
	a.sendCredits = granted
	c, err := s.newConn(a, peer, false)
	if errors.Is(err, errno.ENOBUFS) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var b [negotiateResponseLen]byte
	resp.CreditsGranted = c.credits.grantAll()
	if err := s.id.Accept(ctx, s.param(b[:resp.put(b[:])])); err != nil {
		c.discardUnstarted()
		return nil, err
	}
	c.early = true
	c.start()
	return c, nil
}

// refuse sends a refusal and disconnects, and gives both time to arrive.
func (s *setup) refuse(ctx context.Context, resp negotiateResponse) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var b [negotiateResponseLen]byte
	if s.sendMessage(b[:resp.put(b[:])]) != nil {
		return
	}
	// Disconnect could flush a refusal that was not sent.
	for sent := false; !sent; {
		wc, err := s.completion(ctx)
		if err != nil {
			return
		}
		sent = wc.ID&sendID != 0
	}
	if s.id.Disconnect() != nil {
		return
	}
	for {
		if _, err := s.completion(ctx); err != nil {
			return
		}
	}
}
