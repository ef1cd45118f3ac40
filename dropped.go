package rdmanet

import (
	"log/slog"
	"runtime"
)

// Connections and listeners that a program drops without Close. The public types are handles: goroutines,
// timers and devices refer to what is behind them only, so a handle is garbage as soon as
// the program has dropped it. Its cleanup then closes what is behind it, as package net
// does by finalizers. Methods that block keep their handle alive until they return.

// newHandle returns the Conn for a connection that is handed out.
func newHandle(c *conn) *Conn {
	h := &Conn{c}
	runtime.AddCleanup(h, (*conn).dropped, c)
	return h
}

func (c *conn) dropped() {
	if c.beginClose() {
		go func() { // neither the log nor the connection may hold up other cleanups
			warnDropped(c.set.logger, "connection", "local", c.local, "remote", c.remote)
			c.lingerOn(enterLingering(c))
		}()
	}
}

func newListenerHandle(l *listener) *Listener {
	h := &Listener{l}
	runtime.AddCleanup(h, (*listener).dropped, l)
	return h
}

func (l *listener) dropped() {
	select {
	case <-l.done:
		return
	default:
	}
	go func() {
		warnDropped(l.cfg.Logger, "listener", "local", l.addr)
		l.Close()
	}()
}

// warnDropped logs that the program has dropped something without Close. A nil log means
// slog.Default(): memory and descriptors were in use until now, so the warning is not
// discarded.
func warnDropped(log *slog.Logger, what string, args ...any) {
	if log == nil {
		log = slog.Default()
	}
	log.Warn("rdmanet: "+what+" dropped without Close; the garbage collector closes it", args...)
}
