"""Those who are told of commits. Each try is bounded, and its errors name no secret."""
